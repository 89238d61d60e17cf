"""Bytes of activations that each rank holds for its backward pass, against ring size and sequence length."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ringspan.core.names import CATEGORIES, CheckpointName, LayoutName
from ringspan.measure.bench.machine import describe_machine
from ringspan.measure.bench.step import StepCase, small_llama
from ringspan.measure.trace.tracker import COMMUNICATION, MemoryTracker, tensors_of, train_step
from ringspan.torch.data.batch import shard_batch
from ringspan.torch.layers.modules import local_part
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import launch, local_device
from ringspan.torch.runtime.mesh import init_mesh

VariantName = Literal["plain", "chunks", "offload"]
# What is added to a checkpoint policy; offloading goes without "none", which leaves nothing to offload.
VARIANTS: Final[dict[VariantName, dict[str, Any]]] = {
    "plain": {"feedforward_chunk_tokens": 0},
    "chunks": {"feedforward_chunk_tokens": 512, "loss_chunk_tokens": 512, "loss_chunk_vocabulary": 2048},
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


class LiveTensors(TorchDispatchMode):
    """Knows the storages made inside of it that are still alive; it does not look inside of custom operators."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in COMMUNICATION:  # buffers that FSDP gathers parameters into
            for tensor in tensors_of((args, kwargs, result)):
                self._storages.pop(_storage(tensor)._cdata, None)
            return result
        given = {_storage(tensor)._cdata for tensor in tensors_of((args, kwargs))}
        for tensor in tensors_of(result):
            storage = _storage(tensor)
            if storage._cdata not in given:
                self._storages[storage._cdata] = weakref.ref(storage)
        return result

    def num_bytes(self, *, apart_from: Iterable[Tensor] = ()) -> int:
        """Bytes of the living storages, each counted once, without those of the given tensors."""
        # Parameters are made before, or resized by FSDP meanwhile; neither is an activation.
        known = {_storage(tensor)._cdata for tensor in apart_from}
        living = {cdata: storage() for cdata, storage in self._storages.items() if cdata not in known}
        return sum(storage.nbytes() for storage in living.values() if storage is not None)


def step_bytes(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, int]:
    """Bytes of each category that a rank holds in a step of the model with AdamW, as ``MemoryTracker`` counts them.

    Parameters, gradients and the optimizer's state as the optimizer finds them; the most of every other category.
    """
    tracker, optimizer = MemoryTracker(), torch.optim.AdamW(model.parameters(), lr=0.0)
    with tracker:
        tracker.watch_model(model)
        tracker.watch("activations", batch.values())
        for _ in range(2):  # the optimizer has its state, and FSDP its buffers, from the second step on
            tracker.restart()
            train_step(tracker, model, optimizer, batch)
    state = next(moment.bytes for moment in reversed(tracker.moments) if moment.phase == "backward")
    most = {category: max(moment.bytes[category] for moment in tracker.moments) for category in CATEGORIES}
    return most | {category: state[category] for category in ("parameters", "gradients", "optimizer")}


def held_activations(model: PreTrainedModel, batch: dict[str, Tensor]) -> int:
    """Bytes that the decoder keeps between its forward and its backward pass (parameters gathered by FSDP excepted)."""
    held = 0

    def count(*_: Any) -> None:
        nonlocal held
        held = live.num_bytes(apart_from=model.parameters())

    # Behind the decoder and before the loss, which has gradients of its own.
    handle = model.base_model.register_forward_hook(count)
    live = LiveTensors()
    with live:
        loss = model(**batch).loss
    handle.remove()
    loss.backward()
    model.zero_grad()
    return held


def run(case: MemoryCase, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Activations per rank at a fixed length, and at fixed tokens per rank, for each ring and checkpoint policy.

    ``say`` is told what is measured next.
    """
    rows: list[dict[str, Any]] = []
    per_rank = case.length // max(case.rings)
    for ring in case.rings:
        # The largest ring has both at one length, which is then measured once.
        lengths = dict.fromkeys((case.length, per_rank * ring))
        say(f"three steps on a ring of {ring} at {' and at '.join(f'{length:,}' for length in lengths)} tokens")
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
            model = parallelize(small_llama(step), mesh, layout=case.layout, checkpoint=checkpoint, **VARIANTS[variant])
            tokens = torch.arange(length).remainder(step.vocabulary).unsqueeze(0)
            batch = shard_batch(
                {"input_ids": tokens, "labels": tokens}, mesh, layout=case.layout, device=local_device()
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
    most = step_bytes(model, batch)  # first: FSDP makes its buffers in the model's first step
    return most | {"activations": held_activations(model, batch)}


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor).untyped_storage()
