"""Bytes of activations and of all else that each rank holds, at a fixed length and at fixed tokens per rank.

python -m benchmarks.memory --length 8192
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.category_picture import category_picture
from ringspan.cli.checks import check_dtype, check_picture
from ringspan.cli.commands.bench import Dtype, LayoutOption, Length
from ringspan.core.errors import ConfigError
from ringspan.core.geometry.layout import layout_name
from ringspan.core.messages.numbers import numbers_in
from ringspan.core.names import CATEGORIES, CheckpointName, LayoutName
from ringspan.measure.bench.one_process import StepCase, small_llama
from ringspan.measure.machine import describe_machine
from ringspan.measure.trace.tracker import MemoryTracker, held_activations, train_step
from ringspan.report.drawing import svg
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import launch, local_device
from ringspan.torch.runtime.mesh import init_mesh
from ringspan.torch.shard_batch import shard_batch

VariantName = Literal["plain", "chunks", "offload"]
# What is added to a checkpoint policy; offloading goes without "none", which leaves nothing to offload.
VARIANTS: Final[dict[VariantName, dict[str, Any]]] = {
    "plain": {"feedforward_chunk_tokens": 0},
    "chunks": {
        "feedforward_chunk_tokens": 512,
        "loss_chunk_tokens": 512,
        "loss_chunk_vocabulary": 2048,
    },
    "offload": {"offload": "activations", "feedforward_chunk_tokens": 0},
}


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """Rings to compare; each holds ``length`` tokens in all, and then ``length / max(rings)`` tokens per rank."""

    rings: tuple[int, ...] = (1, 2, 4)
    length: int = 8192
    checkpoints: tuple[CheckpointName, ...] = ("none", "full", "attention")
    variants: tuple[VariantName, ...] = ("plain",)
    layout: LayoutName = "zigzag"
    dtype: str = "float32"


def step_bytes(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, int]:
    """Bytes of each category that a rank holds in a step of the model with AdamW, as ``MemoryTracker`` counts them.

    Parameters, gradients and the optimizer's state as the optimizer finds them; the most of every other category.
    """
    tracker, optimizer = MemoryTracker(), torch.optim.AdamW(model.parameters(), lr=0.0)
    with tracker:
        tracker.watch_model(model)
        # the optimizer has its state, and FSDP its buffers, from the second step on
        tracker.watch("activations", batch.values())
        for _ in range(2):
            tracker.restart()
            train_step(tracker, model, optimizer, batch)
    state = next(
        moment.bytes
        for moment in reversed(tracker.moments)
        if moment.phase == "backward"
    )
    most = {
        category: max(moment.bytes[category] for moment in tracker.moments)
        for category in CATEGORIES
    }
    return most | {
        category: state[category]
        for category in ("parameters", "gradients", "optimizer")
    }


def run(case: MemoryCase) -> dict[str, Any]:
    """Bytes per rank at a fixed length, and at fixed tokens per rank, for each ring and checkpoint policy."""
    rows: list[dict[str, Any]] = []
    per_rank = case.length // max(case.rings)
    for ring in case.rings:
        # The largest ring has both at one length, which is then measured once.
        lengths = dict.fromkeys((case.length, per_rank * ring))
        tokens = " and at ".join(f"{length:,}" for length in lengths)
        print(
            f"three steps on a ring of {ring} at {tokens} tokens",
            file=sys.stderr,
            flush=True,
        )
        rows += launch(_measure, ring, case, tuple(lengths))[0]
    return {"rows": rows, "config": asdict(case), "machine": describe_machine()}


def _measure(case: MemoryCase, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    mesh = init_mesh()
    rows: list[dict[str, Any]] = []
    settings: list[tuple[CheckpointName, VariantName]] = [
        (checkpoint, variant)
        for checkpoint in case.checkpoints
        for variant in case.variants
        if (checkpoint, variant) != ("none", "offload")
    ]
    for checkpoint, variant in settings:
        for length in lengths:
            step = StepCase(length=max(length, case.length), dtype=case.dtype)
            model = parallelize(
                small_llama(step),
                mesh,
                layout=case.layout,
                checkpoint=checkpoint,
                **VARIANTS[variant],
            )
            tokens = torch.arange(length).remainder(step.vocabulary).unsqueeze(0)
            batch = shard_batch(
                {"input_ids": tokens, "labels": tokens},
                mesh,
                layout=case.layout,
                device=local_device(),
            )
            rows.append(
                {
                    "ring": mesh["ring"].size(),
                    "length": length,
                    "tokens_per_rank": batch["input_ids"].shape[1],
                    "checkpoint": checkpoint,
                    "variant": variant,
                    "bytes": _bytes(model, batch),
                }
            )
    return rows


def _bytes(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, int]:
    """Activations held for backward, and the most of every other category."""
    # first: FSDP makes its buffers in the model's first step
    most = step_bytes(model, batch)
    return most | {"activations": held_activations(model, batch)}


def main(
    length: Length = 8192,
    rings: Annotated[str, typer.Option(help="Ring sizes to compare.")] = "1,2,4",
    variants: Annotated[
        str, typer.Option(help="plain, chunks, offload: what is added to each policy.")
    ] = "plain",
    layout: LayoutOption = "zigzag",
    dtype: Dtype = "float32",
    picture: Annotated[
        Path | None, typer.Option(help="Write the bytes by category as an SVG file.")
    ] = None,
) -> None:
    """Measure, and print the result as one JSON object."""
    check_dtype(dtype)
    sizes = numbers_in("--rings", rings, "1,2,4")
    if length < 2 * max(sizes):
        raise ConfigError(
            f"--length {length}: a ring of {max(sizes)} needs at least {2 * max(sizes)} tokens"
        )
    names: tuple[VariantName, ...] = tuple(
        name for name in VARIANTS if name in variants.split(",")
    )
    if len(names) != len(variants.split(",")):
        raise ConfigError(
            f"--variants {variants!r}: choose from {', '.join(VARIANTS)}, with commas"
        )
    if picture:
        check_picture(picture, ".svg")
    result = run(
        MemoryCase(
            rings=sizes,
            length=length,
            variants=names,
            layout=layout_name(layout),
            dtype=dtype,
        )
    )
    if picture:
        drawn = category_picture(result["rows"])
        picture.write_text(svg(drawn) if drawn else "", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from benchmarks import memory

    typer.run(memory.main)
