"""Bytes of activations that each rank holds for its backward pass, against ring size and sequence length."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

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

VariantName = Literal["plain", "chunks", "offload"]
# What is added to a checkpoint policy; offloading goes without "none", which leaves nothing to offload.
VARIANTS: Final[dict[VariantName, dict[str, Any]]] = {
    "plain": {},
    "chunks": {"feedforward_chunk_tokens": 512, "loss_chunk_tokens": 512, "loss_chunk_vocabulary": 2048},
    "offload": {"offload": "activations"},
}


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """Rings to compare; each holds ``length`` tokens in all, and then ``length / max(rings)`` tokens a rank."""

    rings: tuple[int, ...] = (1, 2, 4)
    length: int = 8192
    checkpoints: tuple[CheckpointName, ...] = ("none", "full", "attention")
    variants: tuple[VariantName, ...] = ("plain",)
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


class StepTensors(TorchDispatchMode):
    """Most bytes of each category that live at once, looked at after each operator of a training step.

    What an operator holds only while it runs is not seen: blocks on their way around the ring are for ``bench
    attention`` to measure. Storages are numbered in the order of their making; of an equal step before this one,
    ``outliving`` are the numbers of those that outlived the forward pass, and ``gradients`` of those that became one.
    """

    def __init__(self, outliving: frozenset[int] = frozenset(), gradients: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._outliving, self._gradients = outliving, gradients
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._travelling: set[int] = set()
        self._number = 0
        self.most: dict[str, int] = dict.fromkeys(("activations", "gradients", "communication", "temporaries"), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(tensor)._cdata for tensor in _tensors((args, kwargs))}
        made = {s._cdata: s for s in map(_storage, _tensors(result)) if s._cdata not in given}
        for cdata, storage in made.items():
            self._number += 1
            self._made[cdata] = weakref.ref(storage), self._number
            self._travelling.discard(cdata)
        if func.namespace in _COMMUNICATION:
            self._travelling |= given | made.keys()
        if made:
            self._count()
        return result

    def numbers(self, tensors: Iterable[Tensor] | None = None) -> frozenset[int]:
        """The numbers of the storages of these tensors, or of all that live."""
        if tensors is None:
            return frozenset(number for storage, number in self._made.values() if storage() is not None)
        return frozenset(self._made[cdata][1] for cdata in map(_cdata, tensors) if cdata in self._made)

    def _count(self) -> None:
        now: dict[str, int] = dict.fromkeys(self.most, 0)
        for cdata, (reference, number) in list(self._made.items()):
            storage = reference()
            if storage is None:
                del self._made[cdata]
            else:
                now[self._category(cdata, number)] += storage.nbytes()
        self.most = {name: max(now[name], self.most[name]) for name in self.most}

    def _category(self, cdata: int, number: int) -> str:
        if number in self._gradients:
            return "gradients"
        if cdata in self._travelling:
            return "communication"
        return "activations" if number in self._outliving else "temporaries"


def step_bytes(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, int]:
    """Most bytes of each category that a rank holds in a step of the model with AdamW; see ``StepTensors``."""
    with StepTensors() as first:
        loss = model(**batch).loss
        outliving = first.numbers()
        loss.backward()
    gradients = first.numbers(_local(p.grad) for p in model.parameters() if p.grad is not None)
    del loss
    model.zero_grad()
    with StepTensors(outliving, gradients) as second:
        model(**batch).loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    result = {
        "parameters": sum(_local(p).nbytes for p in model.parameters()),
        "gradients": sum(_local(p.grad).nbytes for p in model.parameters() if p.grad is not None),
        "optimizer": sum(_local(x).nbytes for x in states),
    }
    model.zero_grad()
    return second.most | result


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
                    "peak_bytes": peak_bytes(local_device()),
                    "bytes": _bytes(model, batch),
                }
            )
    return rows


def _bytes(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, int]:
    """Activations held for backward, and the most of every other category."""
    held = held_activations(model, batch)
    return step_bytes(model, batch) | {"activations": held}


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and type(leaf) is not DTensor)


def _cdata(tensor: Tensor) -> int:
    return _storage(tensor)._cdata


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
