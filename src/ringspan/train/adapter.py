"""A run's adapter: PEFT matrices, written as a folder that PEFT opens, or merged."""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import CheckpointError
from ringspan.core.messages.lines import refused
from ringspan.torch.model.adapters import (
    adapter_weights,
    asking_as_before,
    base_of,
    note_bases,
)
from ringspan.torch.model.tied import note_untied, tied_names
from ringspan.torch.model.weights.deferred import (
    Deferred,
    Region,
    deferred,
    part,
    shape_of,
)
from ringspan.torch.model.weights.loading import auto_class
from ringspan.torch.model.weights.writing import (
    MAX_SHARD_SIZE,
    WeightsPlan,
    plan_files,
    saved_names,
    shards_of,
)
from ringspan.train.config.model_table import AdapterConfig

# PEFT puts this before the names of a model's weights
BASE_PREFIX: Final = "base_model.model."
_INNER: Final = ".base_layer."  # PEFT's layers put this between the name of a layer and of its weight


def add_adapter(
    model: PreTrainedModel, settings: AdapterConfig, path: str | None, *, seed: int = 0
) -> Any:
    """Add a run's adapter to the model of ``path``; only it trains, in float32. Without a rank, return the model."""
    if settings.rank is None:
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    targets = list(settings.target_modules)
    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.rank,
        lora_alpha=settings.rank * 2 if settings.alpha is None else settings.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        use_dora=settings.use_dora,
        use_rslora=settings.use_rslora,
        lora_dropout=0.0,
    )
    torch.manual_seed(seed)
    where = f"adapter.target_modules = {targets}"
    with refused(where, ValueError, TypeError, NotImplementedError), asking_as_before():
        peft: Any = get_peft_model(model, lora)
    # An absolute path lets the adapter find its base model from any folder.
    if path is not None and Path(path).is_dir():
        peft.peft_config["default"].base_model_name_or_path = str(Path(path).resolve())
    return peft


def write_adapter(model: Any, weights: dict[str, Any], folder: Path) -> None:
    # PEFT's own method: the model's override would gather weights that rank 0 already has.
    from peft import PeftModel

    PeftModel.save_pretrained(model, str(folder), state_dict=weights)
    note_bases(model, folder)


def plan_merged(
    model: Any, config: PreTrainedConfig, dtype: torch.dtype, *, is_writer: bool
) -> WeightsPlan:
    """Plan a merged model's files, on all ranks; the writer gets the adapter, then each whole tensor in turn.

    Layers that share a weight no longer do once their adapters are merged, which this notes in ``config``.
    """
    from peft import get_peft_model

    matrices = adapter_weights(model, {})
    base: Any = base_of(model)
    with torch.device("meta"), asking_as_before():
        auto = auto_class(config, sees=True)
        # Tied layers that the adapter wraps have other names in ``base``, and are no longer tied once merged.
        plain: Any = auto.from_config(config)
        if tied_names(plain) != tied_names(base):
            note_untied(config)
            plain = auto.from_config(config)
        alone: Any = None  # PEFT changes the model that it is given
        if is_writer:
            alone = get_peft_model(
                auto.from_config(config), model.peft_config["default"]
            )
    names, tensors = saved_names(plain), dict[str, Deferred]()
    every_name = saved_names(base)
    for saved_name, tensor in shards_of(base, base.ring_mesh).items():
        for name in every_name[saved_name]:
            plain_name = name.replace(_INNER, ".")
            if plain_name not in names:
                continue  # the adapter's matrices, and other names of a weight that stays shared
            whole = tensor
            if _INNER in name and name.endswith(".weight"):
                path = name.removesuffix(f"{_INNER}weight")
                layer = _layer(alone, path, matrices) if is_writer else None
                whole = deferred(_Merged(plain_name, tensor, layer, len(tensors)))
            tensors[plain_name] = whole
    if missing := sorted(names.keys() - tensors.keys()):
        raise CheckpointError(
            f"the model has no {missing[0]} to be merged; use the model that the adapter was trained on"
        )
    return plan_files(plain, tensors, max_shard_size=MAX_SHARD_SIZE, dtype=dtype)


def _layer(alone: nn.Module, path: str, matrices: dict[str, Any]) -> nn.Module:
    prefix = f"{BASE_PREFIX}{path}."
    layer = alone.get_submodule(prefix.removesuffix("."))
    own = {
        name.removeprefix(prefix): x
        for name, x in matrices.items()
        if name.startswith(prefix)
    }
    layer.load_state_dict(own, strict=False, assign=True)
    return layer


class _Merged:
    """A weight plus its PEFT matrices, read front to back and held whole until the last part is read."""

    def __init__(
        self, name: str, weight: Deferred, layer: nn.Module | None, place: int
    ) -> None:
        self.name, self.shape, self.dtype, self.place = (
            name,
            tuple(weight.shape),
            weight.dtype,
            (place, 0),
        )
        self._weight, self._layer = weight, layer
        self._whole: Tensor | None = None

    def read(self, region: Region) -> Tensor:
        """Read a part on the writing rank, and an empty one of its shape on others; all ranks read the same parts."""
        if self._whole is None:
            self._whole = self._merge(
                part(self._weight, tuple(slice(0, size) for size in self.shape))
            )
        result = self._whole[region]
        if all(
            each.stop == size for each, size in zip(region, self.shape, strict=True)
        ):
            self._whole = None  # the last part
        return (
            result
            if self._layer is not None
            else torch.empty(shape_of(region), dtype=self.dtype, device="meta")
        )

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
