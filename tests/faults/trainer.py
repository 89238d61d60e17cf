"""A trainer of transformers that is killed while it writes a checkpoint beside its steps."""

import hashlib
import json
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

# here, and not in each fork that trains
from ringspan.hf import RingConfig, RingTrainer
from tests.faults.rows import Row
from tests.hf.trainers import Examples, arguments
from tests.torch.models import build

_SCRATCH = "ringspan-saving-*"


def kill_in_async_save(parent: Path, times: int, seed: int = 0) -> Row:
    """SIGKILL of one of two ranks, or of both, while a trainer with ``async_save`` writes a checkpoint."""
    row = Row(
        fault="kill -9 while a trainer saves beside its steps",
        promise="the newest checkpoint is whole; the run resumes from it, bit for bit",
    )
    generator, folder = random.Random(seed), parent / "trainer"
    seen: dict[int, str] = {}
    leftovers, newest = 0, 0
    steps = 40 * times + 40
    for number in range(times):
        ranks = _start(parent / f"store-{number}", folder, steps)
        begun = _is_saving_after(folder, newest, seconds=120)
        time.sleep(generator.random() * 0.03)
        for process in (ranks, ranks[:1], ranks[1:])[number % 3]:
            process.kill()
        for process in ranks:
            process.join(30)
            process.kill()
            process.join()
        leftovers += any(folder.glob(_SCRATCH))
        before, newest = newest, _newest(folder)
        seen[newest] = _digest(folder / f"checkpoint-{newest}")
        row.count(
            begun and newest > before,
            f"try {number}: {begun}, checkpoint {newest} after {before}",
        )
    whole, digests = parent / "uninterrupted", parent / "digests.json"
    for process in _start(parent / "store-whole", whole, steps, newest, digests):
        process.join()
    expected = {
        int(step): digest for step, digest in json.loads(digests.read_text()).items()
    }
    differing = [step for step, digest in seen.items() if expected[step] != digest]
    row.passed -= len(differing)
    row.failures += [f"checkpoint {step} differs" for step in differing]
    row.figures = {
        "steps": newest,
        "tries_with_leftovers": leftovers,
        "checkpoints_bit_equal": len(seen) - len(differing),
    }
    return row


def _start(
    store: Path,
    folder: Path,
    steps: int,
    last: int | None = None,
    digests: Path | None = None,
) -> list[Any]:
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_train, args=(rank, store, folder, steps, last, digests))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    return ranks


class _Digests(TrainerCallback):
    """The digests of a run's checkpoints, and the step after which it ends."""

    def __init__(self, last: int) -> None:
        self.last, self.found = last, dict[int, str]()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.found[state.global_step] = _digest(folder)
        control.should_training_stop = state.global_step >= self.last


def _train(
    rank: int,
    store: Path,
    folder: Path,
    steps: int,
    last: int | None,
    digests: Path | None,
) -> None:
    """Train from the newest checkpoint, and save after every step."""
    torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    # The survivor's trace and the log of each step are not news.
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sizes = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in sizes.items()}
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "seed": 7}
    seen = None if last is None else _Digests(last)
    trainer = RingTrainer(
        model=build("llama"),
        args=arguments(str(folder), save_total_limit=2, **options),
        train_dataset=Examples(40),
        callbacks=[] if seen is None else [seen],
        ring=RingConfig(async_save=True),
    )
    newest = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    if seen is not None and digests is not None and rank == 0:
        digests.write_text(json.dumps(seen.found))


def _is_saving_after(folder: Path, step: int, seconds: float) -> bool:
    """Wait until a run has written a checkpoint after a step and writes the next one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if _newest(folder) > step and any(folder.glob(_SCRATCH)):
            return True
        time.sleep(0.002)
    return False


def _newest(folder: Path) -> int:
    steps = [path.name.removeprefix("checkpoint-") for path in folder.glob("check*")]
    return max(map(int, steps), default=0)


def _digest(checkpoint: Path) -> str:
    """One digest of a checkpoint's weights, optimizer state and losses."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.rglob("*.safetensors")):
        digest.update(path.relative_to(checkpoint).as_posix().encode())
        # Not the file, whose metadata has no order.
        for name, tensor in sorted(load_file(path).items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    digest.update(json.dumps(losses).encode())
    return digest.hexdigest()
