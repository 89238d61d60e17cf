"""Bytes of activations that each rank holds for its backward pass."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ringspan.measure.trace.tracker import COMMUNICATION, tensors_of
from ringspan.torch.layers.modules import local_part


class LiveTensors(TorchDispatchMode):
    """Record of living storages made inside of it; custom operators are not looked into."""

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
        """Count the bytes of the living storages, each once, without those of the given tensors."""
        # Parameters are made before, or resized by FSDP meanwhile; neither is an activation.
        known = {_storage(tensor)._cdata for tensor in apart_from}
        living = {cdata: storage() for cdata, storage in self._storages.items() if cdata not in known}
        return sum(storage.nbytes() for storage in living.values() if storage is not None)


def held_activations(model: PreTrainedModel, batch: dict[str, Tensor]) -> int:
    """Return the bytes that the decoder keeps from forward to backward, without parameters gathered by FSDP."""
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


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor).untyped_storage()
