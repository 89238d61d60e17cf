"""The weights of a run merged with its adapter, one tensor at a time, while they are written."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ringspan.core.errors import CheckpointError
from ringspan.torch.model.adapters import adapter_weights, asking_as_before, base_of
from ringspan.torch.weights.deferred import Deferred, Region, deferred, part, shape_of
from ringspan.torch.weights.loading import auto_class
from ringspan.torch.weights.saving import plan_files, saved_names, shards_of
from ringspan.torch.weights.writing import MAX_SHARD_SIZE, WeightsPlan
from ringspan.train.adapter import BASE_PREFIX

_INNER = ".base_layer."  # between a layer's name and its weight's, inside of PEFT's layers


def plan_merged(model: Any, config: PreTrainedConfig, dtype: torch.dtype, *, is_writer: bool) -> WeightsPlan:
    """Plan the files of a merged model. All ranks call it; the writer gets the adapter, then each whole tensor in turn.

    Raises:
        CheckpointError: weights of the model are missing beside the adapter.
    """
    from peft import get_peft_model

    matrices = adapter_weights(model, {})
    with torch.device("meta"), asking_as_before():
        auto = auto_class(config, sees=True)
        plain: Any = auto.from_config(config)
        alone: Any = None  # PEFT changes the model that it is given
        if is_writer:
            alone = get_peft_model(auto.from_config(config), model.peft_config["default"])
    names = saved_names(plain)
    tensors: dict[str, Deferred] = {}
    base: Any = base_of(model)
    for name, tensor in shards_of(base, base.ring_mesh).items():
        plain_name = name.replace(_INNER, ".")
        if plain_name not in names:
            continue  # the adapter's own
        if _INNER in name and name.endswith(".weight"):
            path = name.removesuffix(f"{_INNER}weight")
            layer = _layer(alone, path, matrices) if is_writer else None
            tensor = deferred(_Merged(plain_name, tensor, layer, len(tensors)))
        tensors[plain_name] = tensor
    if missing := sorted(names.keys() - tensors.keys()):
        raise CheckpointError(f"the model has no {missing[0]} to be merged; use the adapter's base model")
    return plan_files(plain, tensors, max_shard_size=MAX_SHARD_SIZE, dtype=dtype)


def _layer(alone: Any, path: str, matrices: dict[str, Any]) -> nn.Module:
    """Return PEFT's layer at a path, with the adapter's matrices and no weight yet."""
    prefix = f"{BASE_PREFIX}{path}."
    layer = alone.get_submodule(prefix.removesuffix("."))
    own = {name.removeprefix(prefix): x for name, x in matrices.items() if name.startswith(prefix)}
    layer.load_state_dict(own, strict=False, assign=True)
    return layer


class _Merged:
    """A weight to which PEFT's layer adds its matrices; read front to back, and held whole meanwhile."""

    def __init__(self, name: str, weight: Deferred, layer: nn.Module | None, place: int) -> None:
        self.name, self.shape, self.dtype, self.place = name, tuple(weight.shape), weight.dtype, (place, 0)
        self._weight, self._layer = weight, layer
        self._whole: Tensor | None = None

    def read(self, region: Region) -> Tensor:
        """Read a part on the writing rank, only its shape on others; all ranks read the same parts."""
        if self._whole is None:
            self._whole = self._merge(part(self._weight, tuple(slice(0, size) for size in self.shape)))
        result = self._whole[region]
        if all(each.stop == size for each, size in zip(region, self.shape, strict=True)):
            self._whole = None  # the last part
        return result if self._layer is not None else torch.empty(shape_of(region), dtype=self.dtype, device="meta")

    def _merge(self, weight: Tensor) -> Tensor:
        if self._layer is None:
            return weight
        layer: Any = self._layer
        layer.base_layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.merge(safe_merge=True)
        merged = layer.base_layer.weight.detach()
        layer.base_layer.weight = nn.Parameter(merged.to("meta"), requires_grad=False)
        layer.merged_adapters.clear()
        return merged
