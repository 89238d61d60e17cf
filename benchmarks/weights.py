"""A model from its files onto four ranks and back into files: memory of all processes, bytes read, seconds.

    python benchmarks/weights.py FOLDER [--size 4b] [--ranks 4] [--replicate 1] [--without-step]

FOLDER gets a model of random bfloat16 weights, unless it has one; twice its bytes must be free beside it. Each stage
runs in processes of its own, whose anonymous memory (``RssAnon``: no pages of files) and reads from the disk are those
of the system; the page cache is emptied of the files before. Written to ``benchmarks/results/weights-cpu.json``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "weights-cpu.json"
LENGTH = 64
SHARD_BYTES = 500_000_000  # of a saved file, at most
SHAPES = {
    "6b": {
        "vocab_size": 32_000,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 64,
    },
    "4b": {
        "vocab_size": 32_000,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 40,
    },
    "2b": {
        "vocab_size": 32_000,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 20,
    },
    "tiny": {
        "vocab_size": 500,
        "hidden_size": 160,
        "intermediate_size": 640,
        "num_hidden_layers": 3,
    },
}


def config(size: str) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **SHAPES[size],
        num_attention_heads=20,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def make(folder: Path, size: str) -> None:
    """A model's folder, written a layer at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(size))
    files: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        files.setdefault(parts[2] if parts[1] == "layers" else "rest", {})[name] = (
            parameter
        )
    weights: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for number, parameters in enumerate(files.values(), start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        made = {}
        for name, parameter in parameters.items():
            weights[name] = file
            if parameter.ndim == 1:
                made[name] = torch.ones(parameter.shape, dtype=torch.bfloat16)
            else:
                made[name] = torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(
                    0, 0.02, generator=generator
                )
        save_file(made, folder / file, metadata={"format": "pt"})
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config(size).save_pretrained(folder)


def anonymous(pid: int) -> int:
    """Bytes of a process's memory that are no pages of files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")
    )


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [
                each
                for child in task.read_text().split()
                for each in family(int(child))
            ]
        except OSError:
            continue
    return found


def forget(folder: Path) -> None:
    """Let the page cache forget the files of a folder."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Watched:
    """The peak of the sum of all processes' anonymous memory, by stage; a process says which stage it is in."""

    def __init__(self, command: list[str], board: Path) -> None:
        self.peaks: dict[str, int] = {}
        self.board = board
        board.write_text("starting")
        self.process = subprocess.Popen(command)
        self._watch = threading.Thread(target=self._sample, daemon=True)
        self._watch.start()

    def _sample(self) -> None:
        while self.process.poll() is None:
            stage = self.board.read_text() or "starting"
            total = sum(map(anonymous, family(self.process.pid)))
            self.peaks[stage] = max(self.peaks.get(stage, 0), total)
            time.sleep(0.02)

    def result(self) -> list[dict[str, Any]]:
        self.process.wait()
        self._watch.join()
        if self.process.returncode:
            raise SystemExit(f"failed: {self.process.args}")
        return [
            json.loads(path.read_text())
            for path in sorted(self.board.parent.glob("rank-*.json"))
        ]


def read_bytes() -> int:
    """From the disk, by this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def rank(folder: str, board: str, out: str, replicate: str, steps: str) -> None:
    """What each of the ranks does."""
    import torch
    import torch.distributed as dist

    import ringspan as rs

    torch.set_num_threads(1)
    mesh = rs.init_mesh(replicate=int(replicate))

    def stage(name: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            Path(board).write_text(name)
        time.sleep(0.2)
        dist.barrier()

    # What a first collective and a first forward pass of anything bring with them is not the model's.
    stage("before")
    started, read = time.perf_counter(), read_bytes()
    stage("load")
    model: Any = rs.from_pretrained(folder, mesh)
    facts: dict[str, Any] = {
        "load_seconds": time.perf_counter() - started,
        "load_read_bytes": read_bytes() - read,
        "shard_bytes": sum(p.to_local().nbytes for p in model.parameters()),
        "replica": mesh["replicate"].get_local_rank(),
    }
    stage("save")
    started = time.perf_counter()
    model.save_pretrained(out, max_shard_size=SHARD_BYTES)
    facts["save_seconds"] = time.perf_counter() - started
    if steps == "1":
        facts |= a_step(model, mesh, stage)
    stage("end")
    Path(board).with_name(f"rank-{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def a_step(model: Any, mesh: Any, stage: Callable[[str], None]) -> dict[str, Any]:
    import torch

    import ringspan as rs

    stage("step")
    ids = torch.randint(
        0,
        model.config.vocab_size,
        (1, LENGTH),
        generator=torch.Generator().manual_seed(0),
    )
    started = time.perf_counter()
    loss = model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    return {
        "step_seconds": time.perf_counter() - started,
        "step_tokens": LENGTH,
        "loss": float(loss.detach()),
    }


def alone(folder: str, board: str) -> None:
    """transformers' own way, on one process."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    Path(board).write_text("before")
    time.sleep(0.3)
    started, read = time.perf_counter(), read_bytes()
    Path(board).write_text("load")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    seconds = time.perf_counter() - started
    time.sleep(0.1)
    facts = {"load_seconds": seconds, "load_read_bytes": read_bytes() - read}
    Path(board).with_name("rank-0.json").write_text(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SHAPES, default="4b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument(
        "--without-step",
        action="store_true",
        help="a step takes about 4.3 times the files' bytes",
    )
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args()
    folder: Path = asked.folder
    if not (folder / "config.json").exists():
        make(folder, asked.size)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    layer = max(
        path.stat().st_size for path in folder.glob("model-00002-*.safetensors")
    )
    script = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        board, out = Path(scratch, "stage"), Path(scratch, "saved")
        forget(folder)
        plain = Watched(
            [sys.executable, script, "alone", str(folder), str(board)], board
        )
        one = plain.result()
        forget(folder)
        run = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={asked.ranks}",
            script,
        ]
        ring = Watched(
            [
                *run,
                "rank",
                str(folder),
                str(board),
                str(out),
                str(asked.replicate),
                str(int(not asked.without_step)),
            ],
            board,
        )
        ranks = ring.result()
        same = same_files(folder, out)
    from ringspan.measure.machine import describe_machine

    shards = sum(each["shard_bytes"] for each in ranks)
    before = ring.peaks["before"]
    result = {
        "parameters": files // 2,
        "layers": layers,
        "ranks": asked.ranks,
        "replicas": asked.replicate,
        "file_bytes": files,
        "layer_bytes": layer,
        "shard_bytes": shards,
        "anonymous_bytes": {
            "before, all ranks": before,
            **{
                f"{name}, beyond that": ring.peaks[name] - before
                for name in ("load", "save", "step")
                if name in ring.peaks
            },
            "load, transformers on one process, beyond its own": plain.peaks["load"]
            - plain.peaks["before"],
        },
        "load_bound_bytes": 1.15 * shards + layer,
        "loads_within_bound": ring.peaks["load"] - before <= 1.15 * shards + layer,
        "saves_within_shards_and_a_file": ring.peaks["save"] - before
        <= 1.15 * shards + SHARD_BYTES,
        "load_read_bytes": sum(each["load_read_bytes"] for each in ranks),
        "load_read_bytes_of_further_replicas": sum(
            each["load_read_bytes"] for each in ranks if each["replica"]
        ),
        "load_read_bytes_transformers": one[0]["load_read_bytes"],
        "load_seconds": max(each["load_seconds"] for each in ranks),
        "load_seconds_transformers": one[0]["load_seconds"],
        "save_seconds": max(each["save_seconds"] for each in ranks),
        **{
            name: ranks[0].get(name) for name in ("step_seconds", "step_tokens", "loss")
        },
        "saved_bit_for_bit": same,
        "machine": describe_machine(),
    }
    asked.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def same_files(folder: Path, other: Path) -> bool:
    """Whether two folders have the same tensors bit for bit, read one at a time."""
    import torch
    from safetensors import safe_open

    places = []
    for each in (folder, other):
        found = {}
        for path in sorted(each.glob("*.safetensors")):
            file = safe_open(path, "pt")
            found |= dict.fromkeys(file.keys(), file)
        places.append(found)
    mine, theirs = places
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name].get_tensor(name), theirs[name].get_tensor(name))
        for name in mine
    )


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(*sys.argv[2:])
    elif sys.argv[1] == "alone":
        alone(*sys.argv[2:])
    else:
        main()
