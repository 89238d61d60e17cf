"""Creation of a transformers model without weights, reading of this rank's part of them, and NaN in them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import refused
from ringspan.torch.engine.transport.collectives import take_first
from ringspan.torch.model.weights.deferred import (
    Deferred,
    held_regions,
    part,
    region_of,
    sources_of,
    whole,
)
from ringspan.torch.model.weights.files import WeightFiles
from ringspan.torch.model.weights.packed import INTEGER_CARRIER, settle_packed

_NUMBERS: Final = 1 << 24  # checked at a time, since torch may copy them


def refuse_not_finite(
    named: Iterable[tuple[str, Tensor]], *, masks: bool = True
) -> None:
    """Raise ConfigError for NaN and infinity in unpacked weights; ``masks`` allows -inf in vectors (bias, sinks)."""
    for name, weight in named:
        if count := _num_not_finite(weight, masks=masks):
            raise ConfigError(
                f"{name} has {count} numbers that are NaN or infinite; take weights from before a run diverged, or "
                "convert or download them again"
            )


def named_in(model: nn.Module, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a submodule's parameters by their names in the model."""
    ours = {id(parameter) for parameter in part.parameters()}
    return (
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) in ours
    )


@torch.no_grad()
def _num_not_finite(weight: Tensor, *, masks: bool) -> int:
    """Return the number of NaN and infinite numbers in a weight; 0 for packed, meta and split ones.

    The sum tells at the speed of memory whether there may be any; only then they are counted.
    """
    known = weight.is_floating_point() and weight.dtype not in (
        torch.float4_e2m1fn_x2,
        INTEGER_CARRIER,
    )
    if not known or weight.is_meta or isinstance(weight, DTensor):
        return 0
    count = 0
    for some in weight.detach().reshape(-1).split(_NUMBERS):
        # torch cannot sum float8.
        some = some.float() if some.dtype.itemsize == 1 else some
        # In float16 the sum of finite numbers may be infinite.
        if not some.sum().isfinite():
            wrong = ~some.isfinite()
            count += int(
                (
                    wrong & (some != -torch.inf) if masks and weight.ndim < 2 else wrong
                ).sum()
            )
    return count


_SOURCE: Final = "ring_source"  # attribute of a parameter without memory: the deferred tensor that it stands for


def unread_model(
    where: str, folder: Path, files: WeightFiles, config: PreTrainedConfig, dtype: torch.dtype | str, *,
    trust_remote_code: bool = False, model_class: Any = None,
) -> tuple[PreTrainedModel, set[str]]:  # fmt: skip
    """Return a folder's model with deferred parameters, and the names in its files that it has no place for.

    transformers itself renames, merges, splits, ties and casts. Raises ConfigError, which begins with ``where``, for
    missing or misshapen weights, or another model.
    """
    with refused(where, OSError, ValueError, KeyError, RuntimeError, SafetensorError):
        with torch.device("meta"):
            auto = model_class or auto_class(config)
            made = auto.from_config(config, trust_remote_code=trust_remote_code)
            # A class for images may build only the text model, with its config.
            kind, config = (
                type(made),
                made.config,
            )
        loaded: Any = _uninitialised(kind).from_pretrained(
            None,
            config=config,
            state_dict=dict(files.tensors),
            dtype=dtype,
            ignore_mismatched_sizes=True,  # refused below, in one line
            output_loading_info=True,
            generation_config=_generation_config(folder)
            if kind.can_generate()
            else None,
        )
    model, found = loaded
    check_loaded(where, found)
    model.__class__ = kind
    model.initialize_weights()  # optional weights that the files lack, and computed buffers
    model.config.name_or_path = str(folder)
    return model, found["unexpected_keys"]


def auto_class(config: PreTrainedConfig, *, sees: bool = False) -> Any:
    """Return a config's auto class: AutoModelForCausalLM if it has one, else multimodal.

    The latter first if it ``sees``.
    """
    mappings = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
        AutoModelForSeq2SeqLM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,  # Audio Flamingo's, which has no encoder
    }
    found = [auto for auto, mapping in mappings.items() if type(config) in mapping]
    if sees and AutoModelForMultimodalLM in found:
        return AutoModelForMultimodalLM
    return found[0] if found else AutoModelForCausalLM


def _uninitialised(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Skip the initialisation of missing weights while loading: with wrong files it could exceed memory."""
    own = {
        "__module__": kind.__module__,
        "_initialize_missing_keys": lambda *_, **__: None,
    }
    return type(kind.__name__, (kind,), own)


def _generation_config(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            folder,
            config_file_name="config.json",
            _from_model_config=True,
            local_files_only=True,
        )


def set_aside(model: nn.Module) -> None:
    """Replace deferred parameters by meta tensors with a source, and buffers by values."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Deferred):
                if id(parameter) not in parameters:
                    empty = torch.empty(
                        parameter.shape, dtype=parameter.dtype, device="meta"
                    )
                    parameters[id(parameter)] = nn.Parameter(
                        empty, requires_grad=parameter.requires_grad
                    )
                    setattr(parameters[id(parameter)], _SOURCE, parameter)
                module._parameters[name] = parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Deferred):
                module._buffers[name] = whole(buffer).clone()


def read_whole(model: nn.Module) -> None:
    """Read all deferred parameters and buffers into memory, for local computation."""
    set_aside(model)
    read: dict[int, nn.Parameter] = {}
    for module, name, parameter, source in _unread(model.modules()):
        if id(parameter) not in read:
            read[id(parameter)] = nn.Parameter(
                whole(source).clone(), requires_grad=parameter.requires_grad
            )
        module._parameters[name] = read[id(parameter)]


def _unread(
    modules: Iterable[nn.Module],
) -> Iterator[tuple[nn.Module, str, nn.Parameter, Deferred]]:
    for module in modules:
        for name, parameter in module._parameters.items():
            source = None if parameter is None else source_of(parameter)
            if parameter is not None and source is not None:
                yield module, name, parameter, source


def source_of(parameter: Tensor) -> Deferred | None:
    if isinstance(parameter, Deferred):
        return parameter
    return getattr(parameter, _SOURCE, None) if parameter.is_meta else None


def rows_of(parameter: nn.Parameter, first: int, last: int) -> nn.Parameter:
    """Return rows of a parameter as another one, over the same memory or with a part of its source."""
    rows = nn.Parameter(
        parameter.detach()[first:last], requires_grad=parameter.requires_grad
    )
    if (source := source_of(parameter)) is not None:
        setattr(rows, _SOURCE, source[first:last])
    return rows


def sources_in(model: nn.Module) -> dict[str, Deferred]:
    """Return a model's unread parameters' sources by name, in file order."""
    found = {
        name: source
        for name, p in model.named_parameters()
        if (source := source_of(p)) is not None
    }
    places = {
        name: min((each.place for each in sources_of(source)), default=(0, 0))
        for name, source in found.items()
    }
    return {name: found[name] for name in sorted(found, key=places.__getitem__)}


@contextmanager
def filled(
    *modules: nn.Module,
    recurse: bool = True,
    first_rows: bool = False,
    zeros: bool = False,
) -> Iterator[None]:
    """Fill modules' unread parameters for a trial while active."""
    # ``recurse``: submodules too; ``first_rows``: embeddings repeat their first row; ``zeros``: all without memory.
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    values: dict[int, nn.Parameter] = {}
    try:
        given = (
            each for one in modules for each in (one.modules() if recurse else [one])
        )
        for module, name, parameter, source in _unread(given):
            if id(parameter) not in values:
                if zeros:
                    made = torch.zeros((), dtype=source.dtype).expand(source.shape)
                elif first_rows and isinstance(module, nn.Embedding):
                    made = part(
                        source, (slice(0, 1), *region_of(source.shape[1:]))
                    ).expand(source.shape)
                else:
                    made = whole(source)
                    refuse_not_finite(
                        [(next((each.name for each in sources_of(source)), name), made)]
                    )
                values[id(parameter)] = nn.Parameter(
                    made, requires_grad=parameter.requires_grad
                )
            before.append((module, name, parameter))
            module._parameters[name] = values[id(parameter)]
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter
        for one in modules:
            settle_packed(one)


@torch.no_grad()
def fill_shards(model: nn.Module, sources: dict[str, Deferred]) -> Exception | None:
    """Fill split meta parameters, one by one; return the read error, if any. All ranks call it."""
    # The first rank with a part reads it for the others. A rank that cannot read continues, so that no other waits.
    if not sources:
        return None
    parameters = dict(model.named_parameters())
    empty = {id(parameters[name]) for name in sources}

    def with_memory(tensor: Tensor) -> Tensor:
        if not (isinstance(tensor, DTensor) and tensor.is_meta and id(tensor) in empty):
            return tensor
        return torch.empty_like(tensor, device=tensor.device_mesh.device_type)

    model._apply(with_memory)
    parameters = dict(model.named_parameters())
    problem: Exception | None = None
    for name, source in sources.items():
        parameter: Any = parameters[name]
        local, mesh = parameter.to_local(), parameter.device_mesh
        copies = [
            axis
            for axis, p in enumerate(parameter.placements)
            if p.is_replicate() and mesh.size(axis) > 1
        ]
        if all(mesh.get_local_rank(axis) == 0 for axis in copies) and problem is None:
            try:
                for region in held_regions(parameter):
                    local.copy_(part(source, region))
                refuse_not_finite([(name, local)])
            except (
                ConfigError,
                SafetensorError,
                OSError,
                MemoryError,
                RuntimeError,
            ) as error:
                problem = error
        if not local.numel():
            continue
        message = local.contiguous()
        for axis in copies:
            take_first(message, mesh.get_group(axis))
        if message is not local and copies:
            local.copy_(message)
    return problem


def check_loaded(where: str, found: Mapping[str, Any]) -> None:
    """Raise ConfigError for missing or mismatched weights, which transformers would draw at random."""
    # ``found``: the loading info of ``from_pretrained(..., ignore_mismatched_sizes=True)``; ``where``: the user's call.
    remedy = "use the config.json that belongs to the weights"
    if found["mismatched_keys"]:
        name, here, wanted = min(found["mismatched_keys"])
        raise ConfigError(
            f"{where}: {name} is {list(here)} there, and {list(wanted)} in the model; {remedy}"
        )
    if found["missing_keys"]:
        raise ConfigError(
            f"{where}: has no {first_of(found['missing_keys'])}; {remedy}"
        )


def first_of(names: set[str]) -> str:
    return (
        f"{min(names)} ({len(names)} weights in all)" if len(names) > 1 else min(names)
    )
