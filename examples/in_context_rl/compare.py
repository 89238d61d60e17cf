"""Does an agent get better from attempt to attempt, the more of them fit its context? A table over seeds.

    torchrun --nproc-per-node 2 examples/in_context_rl/compare.py --world grid
    torchrun --nproc-per-node 2 examples/in_context_rl/compare.py --world pendulum --trajectories 1,4,16,64

Each agent is trained on the ring on sequences of so many trajectories, and acts on one process with transformers'
cache. ``bc`` is behaviour cloning, ``1`` the decision transformer with one trajectory, both on the same data. What is
done is in ``--result``, and a run that was ended continues after it.
"""

import argparse
import importlib
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from agent import Agent, Kind, attempts, collect, drawn_from, errors, make_agent, sequences
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs


class Optimizers:
    """Muon for the matrices of the decoder's layers, AdamW for the rest; rates fall linearly over so many steps."""

    def __init__(self, agent: Any, steps: int) -> None:
        inner = {name for name, weight in agent.named_parameters() if weight.ndim == 2 and "layers" in name}
        matrices = [weight for name, weight in agent.named_parameters() if name in inner]
        others = [weight for name, weight in agent.named_parameters() if name not in inner]
        self.agent, self.steps, self.step_number = agent, steps, 0
        self.rates = (
            (torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, momentum=0.95), 0.02),
            (torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0), 3e-3),
        )

    def step(self) -> None:
        """One step, with gradients clipped."""
        torch.nn.utils.clip_grad_norm_(self.agent.parameters(), 1.0)
        share = min(1.0, (self.step_number + 1) / 30, 2 * (1 - self.step_number / self.steps))
        self.step_number += 1
        for optimizer, rate in self.rates:
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad()


def trained(
    world: ModuleType, kind: Kind, seed: int, arguments: argparse.Namespace, mesh: DeviceMesh
) -> tuple[Any, list[float]]:
    """An agent on the ring, and its losses; all kinds of a seed learn from the same trajectories."""
    agent = rs.parallelize(make_agent(world, kind, seed), mesh, checkpoint="none")
    optimizers, random = Optimizers(agent, arguments.steps), np.random.default_rng((seed, 1))
    data = collect(world, world.tasks(arguments.tasks, random), arguments.collected, random)
    batch, losses = max(1, arguments.tokens // (kind.trajectories * world.STEPS)), []
    for _ in range(arguments.steps):
        drawn = drawn_from(data, batch, kind.trajectories, random)
        part = rs.shard_features(sequences(world, kind, drawn), mesh)
        answers = agent(part["features"], part["position_ids"])
        wrong = (errors(answers, part["actions"]) * part["mask"]).sum() / drawn["rewards"].size
        loss = rs.global_sum(wrong, mesh)
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    return agent, losses


def measured(world: ModuleType, kind: Kind, seed: int, arguments: argparse.Namespace, mesh: DeviceMesh) -> dict:
    """A row: the mean return of each attempt over goals that training had not."""
    began = time.perf_counter()
    agent, losses = trained(world, kind, seed, arguments, mesh)
    seconds = time.perf_counter() - began
    folder = Path(arguments.output) / f"{arguments.world}-{name(kind)}-{seed}"
    agent.save_pretrained(folder)  # on every rank; rank 0 writes
    returns = np.zeros(0)
    if dist.get_rank() == 0:
        alone, random = Agent.from_pretrained(folder).eval(), np.random.default_rng((seed, 2))
        tasks = world.unseen(arguments.evaluated, random)
        returns = attempts(world, alone, kind, tasks, arguments.attempts or kind.trajectories, random).mean(0)
    dist.barrier()
    tokens = kind.trajectories * world.STEPS
    return {
        "kind": name(kind), "trajectories": kind.trajectories, "seed": seed, "tokens": tokens,
        "loss": round(float(np.mean(losses[-20:])), 4),
        "returns": [round(float(value), 3) for value in returns], "train_seconds": round(seconds, 1),
    }  # fmt: skip


def name(kind: Kind) -> str:
    """As it is in the table."""
    return str(kind.trajectories) if kind.conditioned else "bc"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=("grid", "pendulum"), default="grid")
    parser.add_argument("--trajectories", default="bc,1,4,8,16", help="in one sequence; bc for behaviour cloning")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=400, help="in which trajectories are collected")
    parser.add_argument("--collected", type=int, default=64, help="trajectories of each task")
    parser.add_argument("--steps", type=int, default=500, help="of training")
    parser.add_argument("--tokens", type=int, default=1280, help="of a step, whatever the trajectories")
    parser.add_argument("--attempts", type=int, help="in a row; default: as many as fit the context")
    parser.add_argument("--evaluated", type=int, default=120, help="rooms or pendulums")
    parser.add_argument("--output", default="runs/in-context-rl", help="folder of the agents")
    parser.add_argument("--result", type=Path, default=Path("runs/in-context-rl.json"))
    arguments = parser.parse_args()

    mesh = rs.init_mesh()
    world = importlib.import_module(arguments.world)
    kinds = [Kind(1, False) if one == "bc" else Kind(int(one)) for one in arguments.trajectories.split(",")]
    rows = json.loads(arguments.result.read_text())["rows"] if arguments.result.is_file() else []
    done = {(row["kind"], row["seed"]) for row in rows}
    for seed in range(arguments.seeds):
        for kind in kinds:
            if (name(kind), seed) in done:
                continue
            rows.append(measured(world, kind, seed, arguments, mesh))
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
                write(arguments, rows)
    dist.destroy_process_group()


def write(arguments: argparse.Namespace, rows: list[dict]) -> None:
    """All rows so far."""
    of_this_call = ("output", "result", "seeds", "trajectories")
    options = {key: str(value) for key, value in vars(arguments).items() if key not in of_this_call}
    made = {"options": options, "ranks": dist.get_world_size(), "torch": torch.__version__, "rows": rows}
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    arguments.result.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
