"""Bytes of activations that each rank holds for its backward pass, against ring size and sequence length."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from ringspan.bench.machine import describe_machine
from ringspan.bench.step import StepCase, small_llama
from ringspan.core.layout import LayoutName
from ringspan.torch.batch import shard_batch
from ringspan.torch.launch import launch, local_device
from ringspan.torch.mesh import init_mesh
from ringspan.torch.models import parallelize
from ringspan.torch.remat import CheckpointName
from ringspan.train.metrics import peak_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """Rings to compare; each holds ``length`` tokens in all, and then ``length / max(rings)`` tokens a rank."""

    rings: tuple[int, ...] = (1, 2, 4)
    length: int = 8192
    checkpoints: tuple[CheckpointName, ...] = ("none", "full", "attention")
    layout: LayoutName = "zigzag"
    dtype: str = "float32"


_COMMUNICATION: Final = frozenset({"c10d", "_c10d_functional", "fsdp"})


class LiveTensors(TorchDispatchMode):
    """Knows the storages made inside of it that are still alive; it does not look inside of custom operators."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in _COMMUNICATION:  # buffers that FSDP gathers parameters into
            for tensor in _tensors((args, kwargs, result)):
                self._storages.pop(_storage(tensor)._cdata, None)
            return result
        given = {_storage(tensor)._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if storage._cdata not in given:
                self._storages[storage._cdata] = weakref.ref(storage)
        return result

    def num_bytes(self, *, apart_from: Iterable[Tensor] = ()) -> int:
        """Bytes of the living storages, each counted once, without those of the given tensors."""
        known = {_storage(tensor)._cdata for tensor in apart_from}
        living = {cdata: storage() for cdata, storage in self._storages.items() if cdata not in known}
        return sum(storage.nbytes() for storage in living.values() if storage is not None)


def held_activations(model: PreTrainedModel, batch: dict[str, Tensor]) -> int:
    """Bytes that the decoder keeps between its forward and its backward pass (parameters gathered by FSDP excepted)."""
    held = 0

    def count(*_: Any) -> None:
        nonlocal held
        held = live.num_bytes(apart_from=(_local(p) for p in model.parameters()))

    handle = model.base_model.register_forward_hook(count)
    live = LiveTensors()
    with live:
        loss = model(**batch).loss
    handle.remove()
    loss.backward()
    model.zero_grad()
    return held


def run(case: MemoryCase) -> dict[str, Any]:
    """Activations per rank at a fixed length, and at fixed tokens a rank, for each ring and checkpoint policy."""
    rows: list[dict[str, Any]] = []
    per_rank = case.length // max(case.rings)
    for ring in case.rings:
        lengths = dict.fromkeys((case.length, per_rank * ring))
        rows += launch(_measure, ring, case, tuple(lengths))[0]
    return {"rows": rows, "config": asdict(case), "machine": describe_machine()}


def _measure(case: MemoryCase, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    mesh = init_mesh()
    rows: list[dict[str, Any]] = []
    for checkpoint in case.checkpoints:
        for length in lengths:
            step = StepCase(length=max(length, case.length), dtype=case.dtype)
            model = parallelize(small_llama(step), mesh, layout=case.layout, checkpoint=checkpoint)
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
                    "peak_bytes": peak_bytes(local_device()),
                    "bytes": {"activations": held_activations(model, batch)},
                }
            )
    return rows


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and type(leaf) is not DTensor)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
