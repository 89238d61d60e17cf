"""Does an agent get better from attempt to attempt, the more of them fit its context? A table over seeds.

    torchrun --nproc-per-node 2 examples/in_context_rl/compare.py --world grid
    torchrun --nproc-per-node 2 examples/in_context_rl/compare.py --world point --trajectories bc,1,4,16,64

Each agent is trained on a ring of all processes, on sequences of so many trajectories, and acts on one process with
transformers' cache. ``bc`` is behaviour cloning, ``1`` the decision transformer with one trajectory, both on the same
data. What is done is in ``--result``, and a run that was ended continues after it, on any number of processes: each row
says how many it had, and within what memory.
"""

import argparse
import ctypes
import importlib
import json
import multiprocessing
import re
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from agent import Agent, Kind, attempts, drawn_from, errors, make_agent, sequences
from optimizers import Optimizers
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.measure.machine import describe_machine

M_MMAP_THRESHOLD: Final = -3
"""Of glibc's mallopt: pieces as large as this go back to the system when they are freed."""


def trained(
    world: ModuleType, kind: Kind, seed: int, data: dict[str, np.ndarray], random: Any,
    arguments: argparse.Namespace, mesh: DeviceMesh,
) -> tuple[Any, list[float]]:  # fmt: skip
    """An agent on the ring, and its losses."""
    agent = rs.parallelize(
        make_agent(world, kind, seed, heads=arguments.heads), mesh, checkpoint="none"
    )
    optimizers = Optimizers(agent, arguments.steps)
    batch, losses = max(1, arguments.tokens // (kind.trajectories * world.STEPS)), []

    def backward(count: int, trajectories: int) -> float:
        drawn = drawn_from(data, count, trajectories, random)
        part = rs.shard_features(sequences(world, kind, drawn), mesh)
        answers = agent(part["features"], part["position_ids"])
        wrong = (errors(world, answers, part["actions"]) * part["mask"]).sum() / drawn[
            "rewards"
        ].size
        loss = rs.global_sum(wrong, mesh)
        loss.backward()
        return loss.item()

    if arguments.memory_mb:
        backward(1, 1)  # what a first step leaves behind is not counted
        agent.zero_grad()
    with limited(
        arguments.memory_mb, f"{kind.trajectories * world.STEPS:,} tokens", mesh.size()
    ):
        for _ in range(arguments.steps):
            losses.append(backward(batch, kind.trajectories))
            optimizers.step()
    return agent, losses


@contextmanager
def limited(megabytes: int | None, what: str, processes: int) -> Iterator[None]:
    """Whatever this process maps besides what it has now, at most so many MB: the system denies it more."""
    if megabytes is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = (
        int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
        << 10
    )
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (megabytes << 20), hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "alloc" in str(error)):
            raise
        failed = f"training on {what} takes more than {megabytes} MB of each of {processes} processes"
        raise SystemExit(f"{failed}: use more of them (--nproc-per-node)") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def measured(
    world: ModuleType, kind: Kind, seed: int, data: dict[str, np.ndarray], random: Any,
    arguments: argparse.Namespace, mesh: DeviceMesh,
) -> dict[str, Any]:  # fmt: skip
    """A row: the mean return of each attempt over tasks that training had not."""
    began = time.process_time()
    agent, losses = trained(world, kind, seed, data, random, arguments, mesh)
    seconds = time.process_time() - began
    folder = Path(arguments.output) / f"{arguments.world}-{name(kind)}-{seed}"
    agent.save_pretrained(folder)  # on every rank; rank 0 writes
    returns = np.zeros(0)
    if dist.get_rank() == 0:
        alone, random = (
            Agent.from_pretrained(folder).eval(),
            np.random.default_rng((seed, 2)),
        )
        tasks = world.unseen(arguments.evaluated, random)
        returns = attempts(
            world, alone, kind, tasks, arguments.attempts or kind.trajectories, random
        ).mean(0)
    dist.barrier()
    tokens = kind.trajectories * world.STEPS
    return {
        "kind": name(kind),
        "trajectories": kind.trajectories,
        "seed": seed,
        "tokens": tokens,
        "ranks": mesh.size(),
        "memory_mb": arguments.memory_mb,
        "loss": round(float(np.mean(losses[-20:])), 4),
        "returns": [round(float(value), 3) for value in returns],
        "train_cpu_seconds": round(seconds, 1),
    }


def collected(
    seed: int, arguments: argparse.Namespace
) -> tuple[dict[str, np.ndarray], Any]:
    """The trajectories that all kinds of a seed learn from, and the generator after them."""
    world, random = (
        importlib.import_module(arguments.world),
        np.random.default_rng((seed, 1)),
    )
    return world.collect(
        world.tasks(arguments.tasks, random), arguments.collected, random
    ), random


def collected_apart(
    seed: int, arguments: argparse.Namespace
) -> tuple[dict[str, np.ndarray], Any]:
    """The same, by another process: what is freed here stays mapped, and steps would find it for nothing."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        return other.submit(collected, seed, arguments).result()


def name(kind: Kind) -> str:
    """As it is in the table."""
    return str(kind.trajectories) if kind.conditioned else "bc"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--world", choices=("grid", "point", "cartpole"), default="grid"
    )
    parser.add_argument(
        "--trajectories",
        default="bc,1,4,8,16",
        help="in one sequence; bc for behaviour cloning",
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--tasks", type=int, default=400, help="in which trajectories are collected"
    )
    parser.add_argument(
        "--collected", type=int, default=64, help="trajectories of each task"
    )
    parser.add_argument(
        "--heads", type=int, default=4, help="of each layer's attention"
    )
    parser.add_argument("--steps", type=int, default=500, help="of training")
    parser.add_argument(
        "--tokens", type=int, default=1280, help="of a step, whatever the trajectories"
    )
    parser.add_argument(
        "--memory-mb",
        type=int,
        help="of each process for its steps; Linux denies it more",
    )
    parser.add_argument(
        "--attempts", type=int, help="in a row; default: as many as fit the context"
    )
    parser.add_argument(
        "--evaluated", type=int, default=120, help="tasks of the evaluation"
    )
    parser.add_argument(
        "--output", default="runs/in-context-rl", help="folder of the agents"
    )
    parser.add_argument("--result", type=Path, default=Path("runs/in-context-rl.json"))
    arguments = parser.parse_args()

    if arguments.memory_mb:
        # Any limit keeps messages out of shared memory, which would be nobody's; the real one is set later.
        resource.setrlimit(
            resource.RLIMIT_AS, (1 << 46, resource.getrlimit(resource.RLIMIT_AS)[1])
        )
        # Without a number, glibc keeps what is freed in ever larger pieces, and those that come again count as none.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 15)
    mesh = rs.init_mesh()
    world = importlib.import_module(arguments.world)
    kinds = [
        Kind(1, False) if one == "bc" else Kind(int(one))
        for one in arguments.trajectories.split(",")
    ]
    rows = (
        json.loads(arguments.result.read_text())["rows"]
        if arguments.result.is_file()
        else []
    )
    done = {(row["kind"], row["seed"]) for row in rows}
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        missing = [kind for kind in kinds if (name(kind), seed) not in done]
        collect = collected_apart if arguments.memory_mb else collected
        data, random = collect(seed, arguments) if missing else ({}, None)
        for kind in missing:
            rows.append(
                measured(world, kind, seed, data, deepcopy(random), arguments, mesh)
            )
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
                write(arguments, rows)
    dist.destroy_process_group()


def write(arguments: argparse.Namespace, rows: list[dict]) -> None:
    """All rows so far."""
    of_this_call = (
        "output",
        "result",
        "seeds",
        "first_seed",
        "trajectories",
        "memory_mb",
    )
    options = {
        key: str(value)
        for key, value in vars(arguments).items()
        if key not in of_this_call
    }
    made = {"options": options, "machine": describe_machine(), "rows": rows}
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    arguments.result.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
