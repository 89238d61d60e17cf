"""Seconds that a save stops the steps of transformers' Trainer and of Lightning, waiting for it and beside them.

    OMP_NUM_THREADS=1 python -m benchmarks.save_stalls [--ranks 2] [--layers 6]

A Llama of float32 weights trains with AdamW on a ring and saves after every fourth step. A row has the median and the
largest time of a save's call, over all ranks, and of the steps between saves. Written to
``benchmarks/results/save-stalls-cpu.json``.
"""

import json
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import torch.distributed as dist
import typer
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

import ringspan as rs
from ringspan.hf import RingConfig, RingTrainer
from ringspan.lightning import RingStrategy
from ringspan.measure.machine import describe_machine
from ringspan.torch.runtime.launch import launch

RESULT: Final = Path(__file__).parent / "results" / "save-stalls-cpu.json"
STEPS: Final = 12
EVERY: Final = 4
TOKENS: Final = 64


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 4096, (TOKENS,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def model_of(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=4096,
        )
    )


class Clock:
    """Seconds of saves and of the other steps of one rank."""

    def __init__(self) -> None:
        self.saves, self.steps = list[float](), list[float]()
        self._began = time.monotonic()

    def begin_step(self) -> None:
        self._began = time.monotonic()

    def end_step(self) -> None:
        self.steps.append(time.monotonic() - self._began)


class TimedTrainer(RingTrainer):
    clock: Clock

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        began = time.monotonic()
        super()._save_checkpoint(*args, **kwargs)
        self.clock.saves.append(time.monotonic() - began)


class TrainerSteps(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.clock.begin_step()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.end_step()


def with_trainer(folder: str, layers: int, *, async_save: bool) -> Clock:
    clock = Clock()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = TimedTrainer(
        model=model_of(layers),
        args=arguments,
        train_dataset=Rows(),
        callbacks=[TrainerSteps(clock)],
        ring=RingConfig(async_save=async_save),
    )
    trainer.clock = clock
    trainer.train()
    return clock


class Module(LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.model = layers, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model: Any = rs.parallelize(model_of(self.layers), self.device_mesh)  # type: ignore[arg-type]

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(**rs.shard_batch(batch, self.device_mesh)).loss  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class LightningSteps(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self.clock.begin_step()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.clock.end_step()


class TimedCheckpoint(ModelCheckpoint):
    def __init__(self, folder: str, clock: Clock) -> None:
        super().__init__(folder, filename="{step}", every_n_train_steps=EVERY)
        self.clock = clock

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        began = time.monotonic()
        super()._save_checkpoint(trainer, filepath)
        self.clock.saves.append(time.monotonic() - began)


def with_lightning(folder: str, layers: int, *, async_save: bool) -> Clock:
    clock = Clock()
    trainer = Trainer(
        strategy=RingStrategy(async_save=async_save),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningSteps(clock), TimedCheckpoint(folder, clock)],
    )
    trainer.fit(Module(layers), DataLoader(Rows()))
    return clock


TRAINERS: Final = {"transformers": with_trainer, "lightning": with_lightning}


def measure(name: str, folder: str, layers: int, async_save: bool) -> dict[str, Any]:
    """The figures of one run, on every rank."""
    clock = TRAINERS[name](folder, layers, async_save=async_save)
    clocks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(clocks, (clock.saves, clock.steps))
    # Ranks wait for each other, so the slowest counts.
    saves = [max(each) for each in zip(*(saves for saves, _ in clocks), strict=True)]
    steps = [max(each) for each in zip(*(steps for _, steps in clocks), strict=True)]
    return {
        "trainer": name,
        "async_save": async_save,
        "save_seconds_median": round(statistics.median(saves), 3),
        "save_seconds_largest": round(max(saves), 3),
        "step_seconds_median": round(statistics.median(steps), 3),
        "step_seconds_largest": round(max(steps[1:]), 3),
        "saves": len(saves),
    }


def main(
    ranks: Annotated[int, typer.Option()] = 2,
    layers: Annotated[int, typer.Option()] = 6,
) -> None:
    rows: list[dict[str, Any]] = []
    for name in TRAINERS:
        for async_save in (False, True):
            with tempfile.TemporaryDirectory(prefix="ringspan-stalls-") as folder:
                found = launch(
                    measure, ranks, name, folder, layers, async_save, threads=1
                )
            rows.append(found[0])
            print(json.dumps(rows[-1]), flush=True)
    parameters = model_of(layers).num_parameters()
    result = {
        "command": f"OMP_NUM_THREADS=1 python -m benchmarks.save_stalls --ranks {ranks} --layers {layers}",
        "machine": describe_machine(),
        "versions": {
            name: version(name) for name in ("torch", "transformers", "lightning")
        },
        "parameters": parameters,
        "checkpoint_bytes": 12 * parameters,  # weights and AdamW's two moments
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
