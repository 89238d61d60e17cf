"""Replacements in torch while a trace is active, where torch has no argument, hook or registry."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes


def real_meshes() -> ExitStack:
    """Let FSDP2 slice and join meshes with real numbers while all other tensors are fake."""
    # A mesh reads its rank from a tensor, which has no values under ``FakeTensorMode``; no argument changes that.
    take, join = DeviceMesh.__getitem__, DeviceMesh._concatenate

    def taken(mesh: DeviceMesh, names: str | tuple[str, ...]) -> DeviceMesh:
        with _disable_current_modes():
            return take(mesh, names)

    def joined(meshes: list[DeviceMesh]) -> DeviceMesh:
        with _disable_current_modes():
            return join(meshes)

    replaced = ExitStack()
    replaced.enter_context(patch.object(DeviceMesh, "__getitem__", taken))
    replaced.enter_context(
        patch.object(DeviceMesh, "_concatenate", staticmethod(joined))
    )
    return replaced


def watched_resizes(
    resized: Callable[[torch.UntypedStorage], None],
) -> AbstractContextManager[object]:
    """Call ``resized`` after a storage changes its size, as FSDP does; a dispatch mode sees only operators."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> object:
        result = resize(storage, size)
        resized(storage)
        return result

    return patch.object(torch.UntypedStorage, "resize_", resize_and_tell)


def watched_predictions(
    predicts: Callable[[bool], None],
) -> AbstractContextManager[object]:
    """Call ``predicts`` when DTensor begins and ends a run on fake tensors that only predicts shapes."""
    # A dispatch mode cannot tell these tensors from the traced run's own: both belong to the active fake mode.
    predict = ShardingPropagator._propagate_tensor_meta_non_cached

    def predict_and_tell(*args: Any) -> object:
        predicts(True)
        try:
            return predict(*args)
        finally:
            predicts(False)

    return patch.object(
        ShardingPropagator, "_propagate_tensor_meta_non_cached", predict_and_tell
    )
