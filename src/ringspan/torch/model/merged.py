"""The plain model inside one that PEFT wraps or that has packed weights: its tensors, merged or unpacked on the way.

No shard changes. Layers that PEFT wraps are merged one at a time by PEFT's own code, on a copy without memory of its
own that gets the gathered weights of that layer.
"""

import copy
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.adapters import asking_as_before, base_of, is_peft
from ringspan.torch.model.consistency.calls import meeting
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.positions import as_trained
from ringspan.torch.model.memory.slices import slices_of
from ringspan.torch.model.tied import note_untied, tied_names
from ringspan.torch.model.weights.deferred import (
    Deferred,
    Region,
    deferred,
    release,
    shape_of,
    whole,
)
from ringspan.torch.model.weights.packed import Unpacking, has_packed
from ringspan.torch.model.weights.shards import (
    Readers,
    saved_names,
    shards_of,
    tensors_of,
)

# PEFT's layers put these between the names of a layer and of its own weight.
_INNER: Final = re.compile(
    r"(?:^|\.)(?:base_layer|original_module|token_adapter)(?=\.)"
)
_PARTS: Final = (
    ".parametrizations."  # torch's, between a module and the parts of its weight
)


def plain_config(base: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of a model's config with its trained length, of unpacked weights."""
    with as_trained(base):
        config: Any = type(base.config).from_dict(base.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def plain_weights(
    model: Any, config: PreTrainedConfig, readers: Readers, *, merge: bool = True
) -> tuple[PreTrainedModel, dict[str, Deferred]]:
    """Return the model of a config without memory, and its saved tensors; all ranks call it.

    Layers that share a weight no longer do once their adapters are merged, which this notes in ``config``.

    Raises:
        UnsupportedError: PEFT cannot merge a layer, or a weight of the plain model is not there; on every rank.
    """
    base: Any = base_of(model)
    found: dict[str, Deferred] = {}
    plain: Any = None
    wrapped: dict[str, Any] = {}
    with meeting(readers.mesh, "finding the plain weights"), torch.device("meta"):
        plain = _plain_class(base)._from_config(config)
        wrapped = dict(_wrapped(base)) if is_peft(model) else {}
        if merge and not all(_stay_tied(names, wrapped) for names in tied_names(plain)):
            note_untied(config)
            plain = _plain_class(base)._from_config(config)
        # transformers keeps how it read the files; a packed model's conversions would pack again.
        conversions = getattr(base, "_weight_conversions", None)
        if conversions is not None and not has_packed(base):
            plain._weight_conversions = conversions
    by_name = _every_name(base, readers)
    with meeting(readers.mesh, "finding the plain weights"):
        twin = None
        if wrapped and merge and readers.is_one:
            twin = _twin(model, base, config)
        layers: dict[str, _Layer] = {}
        for name, aliases in saved_names(plain).items():
            path = next((each for each in _parents(name) if each in wrapped), None)
            if path is None:
                tensor = next((by_name[x] for x in aliases if x in by_name), None)
            else:
                if path not in layers:
                    part = twin and twin.get_submodule(path)
                    state = _under(path, by_name)
                    layers[path] = _Layer(path, wrapped[path], state, part, merge=merge)
                tensor = layers[path].tensor(name.removeprefix(f"{path}."), len(found))
            if tensor is None:
                raise UnsupportedError(
                    f"{class_name(base)} has no {name} of the plain model; use save_pretrained, and merge the "
                    "adapter in one process"
                )
            found[name] = tensor
    return plain, found


def has_wrapped(model: Any) -> bool:
    """Return True if a model saves other names than the plain one."""
    return is_peft(model) or any(_PARTS in name for name in tensors_of(model))


def _every_name(base: Any, readers: Readers) -> dict[str, Deferred]:
    """Return all of a model's tensors under all their names, packed ones as plain numbers."""
    names = saved_names(base)
    by_name = {
        alias: tensor
        for name, tensor in shards_of(base, readers).items()
        for alias in names[name]
    }
    packed: dict[str, list[Deferred]] = {}
    for name in [*by_name]:
        if _PARTS in name:
            place = name.replace(_PARTS, ".").rpartition(".")[0]
            packed.setdefault(place, []).append(by_name.pop(name))
    for place, parts in packed.items():
        by_name[place] = _unpacked(base, place, parts, len(by_name))
    return by_name


def _unpacked(base: Any, place: str, parts: list[Deferred], number: int) -> Any:
    """Return a packed weight as plain numbers, slice by slice where experts are gathered so."""
    path, _, own = place.rpartition(".")
    module = base.get_submodule(path)
    found: list[Any] = []
    for part, rows in slices_of(module):
        unpacking = Unpacking(part, own, base.dtype)
        mine = [each[rows] for each in parts]
        found.append(deferred(_Unpacked(place, unpacking, mine, number)))
    return found[0] if len(found) == 1 else torch.cat(found)


def _plain_class(base: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class that was given to ``parallelize``, before mix-ins and FSDP2 took its name."""
    for kind in type(base).__mro__:
        there = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
        if there is kind and issubclass(kind, PreTrainedModel):
            return kind
    raise UnsupportedError(
        f"{class_name(base)} is not found in {type(base).__module__}; move the class to the top of its module"
    )


def _parents(name: str) -> Iterator[str]:
    """Yield the paths of the modules that a name is inside of, from the outermost."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count])


def _wrapped(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path and module of each outermost layer that PEFT wraps."""
    kinds = (
        sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer,
        sys.modules["peft.utils.other"].AuxiliaryTrainingWrapper,
    )
    found: set[str] = set()
    for path, module in base.named_modules():
        if isinstance(module, kinds) and found.isdisjoint(_parents(path)):
            found.add(path)
            yield path, module


def _stay_tied(names: list[str], wrapped: dict[str, Any]) -> bool:
    """Return whether names that share a weight still do once merged: no layer, or all, train the same for it."""
    layers = [
        wrapped[path] for name in names for path in _parents(name) if path in wrapped
    ]
    if len(layers) != len(names):
        return not layers
    # A layer whose adapter belongs to another one has no parameters of its own.
    trained = [
        {id(p) for p in layer.parameters() if p.requires_grad} for layer in layers
    ]
    every = set[int]().union(*trained)
    return all(each in (set[int](), every) for each in trained)


def _twin(model: Any, base: Any, config: PreTrainedConfig) -> nn.Module:
    """Return the plain model with the active adapters as PEFT adds them, without memory."""
    get_peft_model = sys.modules["peft"].get_peft_model
    first, *others = model.active_adapters
    with torch.device("meta"), asking_as_before():
        plain = _plain_class(base)._from_config(copy.deepcopy(config))
        made = get_peft_model(plain, _settings(model, first), adapter_name=first)
        for name in others:
            made.add_adapter(name, _settings(model, name))
        made.base_model.set_adapter([first, *others])
    twin = made.get_base_model()
    for path, module in base.named_modules():
        # Scales may have been set since, and adapters merged before the model was split.
        for name in ("scaling", "merged_adapters"):
            if isinstance(own := vars(module).get(name), dict | list):
                setattr(twin.get_submodule(path), name, copy.copy(own))
    return twin


def _settings(model: Any, adapter: str) -> Any:
    settings = copy.deepcopy(model.peft_config[adapter])
    if hasattr(settings, "init_lora_weights"):
        settings.init_lora_weights = False  # some ways of it read the weights
    return settings


class _Kept:
    """A source that keeps its whole tensor until it is released."""

    def __init__(self, name: str, like: Any, place: int) -> None:
        self.name, self.place = name, (place, 0)
        self.shape, self.dtype = tuple(like.shape), like.dtype
        self._whole: Tensor | None = None

    def read(self, region: Region) -> Tensor:
        """Read a part; all ranks read the same parts in the same order."""
        if self._whole is None:
            self._whole = self.make()
        if self._whole.is_meta:  # on a rank that does not read
            return torch.empty(shape_of(region), dtype=self.dtype, device="meta")
        return self._whole[region]

    def make(self) -> Tensor:
        raise NotImplementedError

    def release(self) -> None:
        self._whole = None


class _Unpacked(_Kept):
    """A packed weight as plain numbers, from its gathered parts."""

    def __init__(
        self, name: str, unpacking: Unpacking, parts: Sequence[Any], place: int
    ) -> None:
        super().__init__(name, unpacking, place)
        self._unpacking, self._parts = unpacking, parts

    def make(self) -> Tensor:
        parts = [whole(each) for each in self._parts]
        if any(part.is_meta for part in parts):
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return self._unpacking(parts)


def _under(path: str, by_name: dict[str, Deferred]) -> dict[str, Deferred]:
    start = f"{path}."
    return {
        name.removeprefix(start): tensor
        for name, tensor in by_name.items()
        if name.startswith(start)
    }


class _Layer:
    """A layer that PEFT wraps: its tensors, and the plain layer's, which PEFT makes from them."""

    def __init__(
        self,
        path: str,
        module: Any,
        state: dict[str, Deferred],
        twin: nn.Module | None,
        *,
        merge: bool,
    ) -> None:
        """Take a copy of the layer without memory, on ranks that read; without ``merge``, the layer as it was wrapped.

        Raises UnsupportedError for a tensor of the copy that is not in ``state``.
        """
        self._state, self._twin, self._merge = state, twin, merge
        active = module.active_adapters if hasattr(module, "modules_to_save") else []
        # Another copy of the module, which the active adapter trains and uses.
        self._inside = f"modules_to_save.{active[0]}." if merge and active else ""
        self._like: dict[str, Deferred] = {}
        self._made: dict[str, Tensor] = {}
        missing = (
            set[str]() if twin is None else twin.state_dict().keys() - state.keys()
        )
        if missing:
            raise UnsupportedError(
                f"{path} has no {min(missing)}, which PEFT merges; use save_pretrained, and merge in one process"
            )

    def tensor(self, name: str, place: int) -> Deferred | None:
        """Return a tensor of the plain layer by its name there; None if there is none."""
        start = self._inside
        for key, tensor in self._state.items():
            inner = _INNER.sub("", key.removeprefix(start)).lstrip(".")
            if key.startswith(start) and inner == name:
                if not self._merge:
                    return tensor
                self._like[name] = tensor
                return deferred(_Merged(self, name, tensor, place))
        return None

    @torch.no_grad()
    def take(self, name: str) -> Tensor:
        """Return a merged tensor; all of the layer's are made together, collectively."""
        if name not in self._made:
            self._made = self._merged()
        return self._made[name]

    def drop(self, name: str) -> None:
        self._made.pop(name, None)

    def _merged(self) -> dict[str, Tensor]:
        """Return the layer's plain tensors, merged by PEFT into a copy; on ``meta`` if this rank has no copy.

        Every rank reads the whole parts, since reading is collective; the shards keep their numbers.
        """
        state: dict[str, Tensor] = {}
        for name, tensor in self._state.items():
            state[name] = whole(tensor)
            release(tensor)
        if self._twin is None:
            return {
                name: torch.empty(x.shape, dtype=x.dtype, device="meta")
                for name, x in self._like.items()
            }
        layer: Any = copy.deepcopy(self._twin)
        layer.load_state_dict(state, strict=False, assign=True)
        state.clear()
        if hasattr(layer, "unload_and_optionally_merge_module"):
            layer = layer.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
        else:
            layer.merge()
            layer = layer.get_base_layer()
        found = tensors_of(layer)
        return {name: found[name].detach() for name in self._like}


class _Merged(_Kept):
    def __init__(self, layer: _Layer, name: str, like: Deferred, place: int) -> None:
        super().__init__(name, like, place)
        self._layer = layer

    def make(self) -> Tensor:
        return self._layer.take(self.name)

    def release(self) -> None:
        super().release()
        self._layer.drop(self.name)
