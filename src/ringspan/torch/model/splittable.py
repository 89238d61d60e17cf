"""Checks that a model's weights can be split over ranks."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.consistency.fixed import HOOKED
from ringspan.torch.model.layers.blockwise.blocks import mixes_tokens
from ringspan.torch.model.layers.decoder import layers_of
from ringspan.torch.model.layers.embedding import own_gradient
from ringspan.torch.model.memory.shared_blocks import find_shared_blocks
from ringspan.torch.model.weights.packed import (
    PACKERS,
    is_packed,
    packed_weights,
    parts_in,
    plain_parts,
)

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Modules of bitsandbytes whose packed weights can be split.
_SPLITTABLE: Final = (
    "Linear4bit",
    "LinearFP4",
    "LinearNF4",
    "Linear8bitLt",
)

DEQUANTISE: Final = (
    "load it without quantization_config or, where its files are quantised, dequantise it in one process: "
    "from_pretrained(..., quantization_config=<its config class>(dequantize=True)) or model.dequantize(), then "
    "save_pretrained. Frozen weights that are quantised by bitsandbytes (BitsAndBytesConfig) or torchao "
    "(Int8WeightOnlyConfig, IntxWeightOnlyConfig) can be split: quantise with these, and train adapters"
)


def refuse_weights(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for weights that FSDP2 cannot shard, or whose gradient needs the tokens of all ranks."""
    name = type(model).__name__
    if "forward" in vars(model):
        raise UnsupportedError(
            f"{name} has a forward that was set on it, which would not be called; del model.forward"
        )
    method = getattr(model, "quantization_method", None)
    method = getattr(method, "value", method)
    is_quantised = getattr(model, "hf_quantizer", None) is not None or getattr(
        model, "is_quantized", False
    )
    if is_quantised and method not in PACKERS:
        how = f" ({method})" if method else ""
        raise UnsupportedError(
            f"{name} is quantised{how}, and packed weights cannot be split over ranks; {DEQUANTISE}"
        )
    for path, module in model.named_modules():
        _refuse_module(name, path, module)
    parts = parts_in(model)
    for path, parameter in model.named_parameters():
        if id(parameter) not in parts:
            _refuse_parameter(name, path, parameter)
    _refuse_mixing(name, model)
    _refuse_shared_memory(name, model)
    find_shared_blocks(model)
    for part in shards_of(model):
        _refuse_mixed_types(name, part)


def _refuse_parameter(name: str, path: str, parameter: nn.Parameter) -> None:
    """Raise UnsupportedError for a weight that was sharded before, is of an unknown type or dtype, or has hooks."""
    if isinstance(parameter.data, DTensor):
        raise UnsupportedError(
            f"{name} was sharded before ({path} is a DTensor); give the model as it was"
        )
    if is_packed(parameter):
        _refuse_packed(name, path, parameter)
        return
    if (
        type(parameter.data) not in (Tensor, FakeTensor)
        or parameter.dtype not in _DTYPES
    ):
        given = (
            parameter.dtype
            if parameter.dtype not in _DTYPES
            else f"a {type(parameter.data).__name__}"
        )
        raise UnsupportedError(
            f"{name}: {path} is {given}, not supported yet; use float32, bfloat16 or float16"
        )
    if parameter._backward_hooks:
        raise UnsupportedError(f"{name}: {path} {HOOKED}")


def shards_of(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    rest = dict(model.named_parameters())
    for path, layer in layers_of(model).items():
        found = (f"{path}.{name}" for name, _ in layer.named_parameters())
        yield {name: rest.pop(name) for name in found if name in rest}
    yield rest


def _refuse_module(name: str, path: str, module: Any) -> None:
    """Raise UnsupportedError for a module that is sharded, quantised in an unknown way, or has merged adapters.

    An embedding is refused if its gradient depends on all tokens of a step.
    """
    if isinstance(module, FSDPModule):
        raise UnsupportedError(
            f"{name} was sharded before (fully_shard of {path or 'it'}); give the model as it was"
        )
    if any(
        kind.__module__.startswith("bitsandbytes") and kind.__name__ in _SPLITTABLE
        for kind in type(module).__mro__
    ):
        _refuse_bitsandbytes(name, path, module)
    elif type(module).__module__.startswith(("torch.ao.nn", *PACKERS)):
        raise UnsupportedError(
            f"{name} is quantised ({path} is a {type(module).__name__}), and packed weights cannot be split over "
            f"ranks; {DEQUANTISE}"
        )
    if getattr(module, "merged_adapters", None):
        raise UnsupportedError(
            f"{name} has merged adapters ({path}), which could not be unmerged again; use merge_and_unload() or "
            "unmerge_adapter() before parallelize"
        )
    option = own_gradient(module) if isinstance(module, nn.Embedding) else ""
    if option:
        raise UnsupportedError(
            f"{name}: {path} has {option}, which depends on all tokens of a step, and a rank has some; leave it out"
        )


def _refuse_bitsandbytes(name: str, path: str, module: Any) -> None:
    """Raise UnsupportedError for a projection that is not packed yet, or treats columns by all tokens' values."""
    state, weight = getattr(module, "state", None), module.weight
    if state is not None and state.threshold > 0:
        raise UnsupportedError(
            f"{name}: {path} computes columns with values above llm_int8_threshold={state.threshold} apart, which it "
            "chooses by all tokens, and a rank has some; use llm_int8_threshold=0.0, or load_in_4bit"
        )
    scales = weight.quant_state if state is None else weight.SCB
    if scales is None or getattr(scales, "packing_format_for_cpu", False):
        how = (
            "is not packed yet"
            if scales is None
            else "was packed again by a forward pass on a CPU"
        )
        raise UnsupportedError(
            f"{name}: {path} (a {type(module).__name__}) {how}; load the model with "
            "quantization_config=BitsAndBytesConfig(...), and call parallelize before it runs"
        )


def _refuse_packed(name: str, path: str, weight: Tensor) -> None:
    kind = type(weight).__name__
    if weight.requires_grad:
        raise UnsupportedError(
            f"{name}: {path} is packed (a {kind}) and would be trained; freeze it with requires_grad_(False), and "
            "train adapters (PEFT)"
        )
    for part, tensor in plain_parts(path, weight):
        if type(tensor) not in (Tensor, FakeTensor) or not tensor.ndim:
            what = f"a {type(tensor).__name__}" if tensor.ndim else "one number"
            raise UnsupportedError(
                f"{name}: {path} is packed (a {kind}) in a way that cannot be split over ranks ({part} is {what}); "
                "quantise with a scale per row or per group, such as Int8WeightOnlyConfig() of torchao"
            )


def refuse_cast(model: PreTrainedModel, compute_dtype: torch.dtype | None) -> None:
    """Raise UnsupportedError for packed weights whose parts would be cast like weights."""
    path, _, _, weight = next(packed_weights(model), ("", None, "", None))
    if compute_dtype is not None and weight is not None:
        raise UnsupportedError(
            f"compute_dtype={compute_dtype}: {path} of {type(model).__name__} is packed (a {type(weight).__name__}), "
            "and its parts would be cast; leave it out, and load the model in that dtype before it is quantised"
        )


def _refuse_mixing(name: str, model: nn.Module) -> None:
    tried: set[Any] = set()
    for path, module, _, weight in packed_weights(model):
        # Weights of bitsandbytes are checked by _refuse_bitsandbytes.
        if not hasattr(weight, "__tensor_flatten__"):
            continue
        kind = type(module), repr(weight.__tensor_flatten__()), tuple(weight.shape)
        if not isinstance(module, nn.Linear) or kind in tried or weight.is_meta:
            continue
        tried.add(kind)
        gives, size = weight.shape
        if reason := mixes_tokens(module, size, gives=gives):
            raise UnsupportedError(
                f"{name}: {path}, quantised with its activations, {reason}, of which each rank has some; use a scale "
                "per token (granularity=PerRow()), or quantise weights alone (Int8WeightOnlyConfig)"
            )


def _refuse_shared_memory(name: str, model: nn.Module) -> None:
    """Raise UnsupportedError for two parameters over the same memory: sharding would separate them."""
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    parameters = (
        part
        for path, weight in model.named_parameters()
        for part in plain_parts(path, weight)
    )
    for path, parameter in parameters:
        sizes = zip(parameter.shape, parameter.stride(), strict=True)
        first = int(parameter.storage_offset())
        last = first + (
            sum((size - 1) * stride for size, stride in sizes)
            if parameter.numel()
            else -1
        )
        here = ranges.setdefault(parameter.untyped_storage()._cdata, [])
        for start, end, other in here:
            if start <= last and first <= end:
                raise UnsupportedError(
                    f"{name}: {other} and {path} are two parameters over the same memory, which would part when they "
                    "are split; tie them as one nn.Parameter (PEFT: without ensure_weight_tying on a LoRA embedding)"
                )
        here.append((first, last, path))


def _refuse_mixed_types(name: str, parameters: dict[str, nn.Parameter]) -> None:
    types = {
        parameter.dtype: path
        for path, parameter in parameters.items()
        if parameter.requires_grad
    }
    if len(types) > 1:
        listed = " and ".join(
            f"{path} in {str(dtype).removeprefix('torch.')}"
            for dtype, path in types.items()
        )
        raise UnsupportedError(
            f"{name} trains {listed}: those of one layer, and those outside of layers, must be of one "
            "type. Load it in float32 and use parallelize(compute_dtype=torch.bfloat16); or, with PEFT, "
            "get_peft_model(..., autocast_adapter_dtype=False)"
        )
