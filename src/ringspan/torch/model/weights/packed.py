"""Frozen weights packed by torchao (int8, int4) or bitsandbytes (nf4, fp4, int8), sharded as plain tensors.

FSDP2 cannot shard packed tensor subclasses. So each is replaced by its parts (integers, scales, zero points) as
parameters, sharded and gathered layer by layer at their packed size; its module rebuilds the packed tensor on access.
Weights that are not read yet are packed one at a time, on each rank, as they are read.
"""

from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.torch.model.weights.deferred import Deferred

PACKERS: Final = ("torchao", "bitsandbytes")
# FSDP2 takes no integer parameters before torch 2.12, so they are viewed as floating-point numbers of equal width.
_TAKES_INTEGERS: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
INTEGER_CARRIER: Final = torch.float8_e5m2  # no model has weights of this dtype
_CARRIERS: Final = {
    1: INTEGER_CARRIER,
    2: torch.float16,
    4: torch.float32,
    8: torch.float64,
}


class Packing(Protocol):
    constants: dict[str, Tensor]  # small tensors that all ranks keep: tables of codes

    def parts(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the plain tensors of a packed one, which share its memory."""
        ...

    def rebuild(self, parts: dict[str, Tensor]) -> Any: ...


class _Flattened:
    """Packing of torchao: its subclasses flatten themselves by torch's protocol for that."""

    def __init__(self, tensor: Any) -> None:
        self._kind, self.constants = type(tensor), dict[str, Tensor]()
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._names, self._facts = tensor.__tensor_flatten__()

    def parts(self, tensor: Tensor) -> dict[str, Tensor]:
        return {name: getattr(tensor, name) for name in self._names}

    def rebuild(self, parts: dict[str, Tensor]) -> Any:
        return self._kind.__tensor_unflatten__(parts, self._facts, None, None)


class FourBits:
    """``Params4bit`` of bitsandbytes: two weights in a byte, a scale for each block, which may be packed itself."""

    def __init__(self, kind: Any, state: Any, storage: torch.dtype) -> None:
        self._kind, self._state = kind, type(state)
        self._facts = {"blocksize": state.blocksize, "quant_type": state.quant_type}
        self.shape, self.dtype, self._storage = state.shape, state.dtype, storage
        self.constants = {"code": state.code}
        self._nested: dict[str, Any] = {}
        if state.nested:
            self.constants["nested_code"] = state.state2.code
            self._nested = {
                "blocksize": state.state2.blocksize,
                "dtype": state.state2.dtype,
            }

    def parts(self, tensor: Any) -> dict[str, Tensor]:
        return self.parts_of(tensor.detach().as_subclass(Tensor), tensor.quant_state)

    @staticmethod
    def parts_of(packed: Tensor, state: Any) -> dict[str, Tensor]:
        """Return the parts of packed numbers with bitsandbytes' state."""
        found = {"packed": packed.view(torch.uint8), "absmax": state.absmax}
        if state.nested:
            found |= {
                "nested_absmax": state.state2.absmax,
                "offset": state.offset.view(1),
            }
        return found

    def rebuild(self, parts: dict[str, Tensor]) -> Any:
        """Return a ``Params4bit`` over these parts, with a new quantisation state, nested if scales are packed too."""
        nested: dict[str, Any] = {}
        if self._nested:
            inner = self._state(
                absmax=parts["nested_absmax"], code=parts["nested_code"], **self._nested
            )
            nested = {"offset": parts["offset"].squeeze(), "state2": inner}
        about = {
            "code": parts["code"],
            "shape": self.shape,
            "dtype": self.dtype,
            **self._facts,
        }
        return self._kind(
            parts["packed"].view(self._storage),
            quant_state=self._state(absmax=parts["absmax"], **about, **nested),
            compress_statistics=bool(self._nested),
            quant_storage=self._storage,
            bnb_quantized=True,
            **self._facts,
        )


class EightBits:
    """``Int8Params`` of bitsandbytes: rows of int8, a scale for each."""

    def __init__(self, kind: Any) -> None:
        self._kind, self.constants = kind, dict[str, Tensor]()

    def parts(self, tensor: Any) -> dict[str, Tensor]:
        return {"packed": tensor.detach().as_subclass(Tensor), "scales": tensor.SCB}

    def rebuild(self, parts: dict[str, Tensor]) -> Any:
        packed = parts["packed"]
        return self._kind(packed, requires_grad=False, CB=packed, SCB=parts["scales"])


def is_packed(tensor: Tensor) -> bool:
    """Return True if a weight is a tensor of torchao or of bitsandbytes."""
    return type(tensor).__module__.startswith(PACKERS)


def has_rows(tensor: Any) -> bool:
    """Return whether a packed weight can be cut along its first dimension: each of its parts has that one too."""
    packing = packing_of(tensor)
    parts = packing.parts(tensor).values()
    rows = tensor.shape[:1]
    return isinstance(packing, _Flattened) and all(p.shape[:1] == rows for p in parts)


def packing_of(tensor: Any) -> Packing:
    if hasattr(tensor, "quant_state"):
        return FourBits(type(tensor), tensor.quant_state, tensor.quant_storage)
    return EightBits(type(tensor)) if hasattr(tensor, "SCB") else _Flattened(tensor)


def plain_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and plain tensors of a weight, itself unless packed. They share its memory."""
    if is_packed(tensor):
        for part, plain in packing_of(tensor).parts(tensor).items():
            yield f"{name}.{part}", plain
    else:
        yield name, tensor


def packed_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield path, module, name and tensor of each packed weight; a shared one repeatedly."""
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is not None and is_packed(weight):
                yield path, module, name, weight


def settle_packed(model: nn.Module) -> None:
    """Move scales that a forward pass of bitsandbytes took back to the weights, and prevent packing again."""
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # in evaluation it packs weights again, in place
            module.support_avx512bf16_for_cpu = False
        state: Any = getattr(module, "state", None)
        if type(state).__name__ == "MatmulLtState" and state.SCB is not None:
            # A weight that is split is rebuilt with its scales anyway.
            weight = module._parameters.get("weight")
            if weight is not None and weight.SCB is None:
                weight.CB, weight.SCB = weight.data, state.SCB
            state.reset_grads()  # it holds the whole weight


def split_into_parts(model: nn.Module) -> None:
    """Replace each packed weight by its parts as parameters; ``module.weight`` rebuilds it."""
    for _, module, name, weight in [*packed_weights(model)]:
        packing = packing_of(weight)
        split_weight(module, name, packing, packing.parts(weight))


def split_weight(
    module: nn.Module, name: str, packing: Packing, parts: dict[str, Tensor]
) -> None:
    # unsafe skips a comparison with the original, which packed tensors do not support.
    parametrize.register_parametrization(
        module, name, _Packed(packing, parts), unsafe=True
    )
    # parametrize gave this module its own class. bitsandbytes' method would save from the whole weight.
    setattr(type(module), "_save_to_state_dict", nn.Module._save_to_state_dict)  # noqa: B010


def has_packed(model: nn.Module) -> bool:
    return bool(parts_in(model)) or next(packed_weights(model), None) is not None


def parts_in(model: nn.Module) -> set[int]:
    lists = (
        module
        for module in model.modules()
        if isinstance(module, parametrize.ParametrizationList)
    )
    return {
        id(p)
        for each in lists
        if isinstance(each[0], _Packed)
        for p in each.parameters()
    }


class _Packed(nn.Module):
    def __init__(self, packing: Packing, parts: dict[str, Tensor]) -> None:
        """Take the parts of a packed weight, until ``right_inverse`` gives them to torch as parameters.

        Integers are viewed as floating-point numbers of their size if FSDP2 takes no integers.
        """
        super().__init__()
        self._packing, self._names = packing, [*parts]
        self._dtypes = [part.dtype for part in parts.values()]
        self._shape = tuple(next(iter(parts.values())).shape)
        self._given = [
            part
            if part.is_floating_point() or _TAKES_INTEGERS
            else part.view(_CARRIERS[part.dtype.itemsize])
            for part in parts.values()
        ]
        for name, constant in packing.constants.items():
            self.register_buffer(name, constant, persistent=False)

    def right_inverse(self, tensor: object) -> list[Tensor]:
        given, self._given = self._given, []
        return given

    def unpacked(self, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of the plain weight; ``dtype`` where the packing has none of its own."""
        packing: Any = self._packing
        if isinstance(packing, EightBits):
            return self._shape, dtype
        return tuple(packing.shape), packing.dtype

    # Before weights are read, an empty tensor of the same kind is returned.
    def forward(self, *parts: Tensor) -> Any:
        if isinstance(parts[0], Deferred):
            parts = tuple(torch.empty(part.shape, dtype=part.dtype) for part in parts)
        if not _TAKES_INTEGERS:
            parts = tuple(
                part.view(dtype)
                for part, dtype in zip(parts, self._dtypes, strict=True)
            )
        return self._packing.rebuild(
            dict(zip(self._names, parts, strict=True)) | dict(self.named_buffers())
        )


class Unpacking:
    """A weight of a module that is split into packed parts: its shape and dtype as plain numbers, and these."""

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype) -> None:
        """Take a module's split weight; ``dtype`` is its plain dtype if the packing does not tell it."""
        parts: Any = module.get_submodule(f"parametrizations.{name}")
        self._packed: _Packed = parts[0]
        self.shape, self.dtype = self._packed.unpacked(dtype)

    def __call__(self, parts: list[Tensor]) -> Tensor:
        """Return the plain weight of whole parts."""
        tensor: Any = self._packed(*parts)
        if hasattr(tensor, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            return dequantize_4bit(tensor.data, tensor.quant_state)
        if hasattr(tensor, "SCB"):
            from bitsandbytes.functional import int8_vectorwise_dequant

            return int8_vectorwise_dequant(tensor.data, tensor.SCB).to(self.dtype)
        return tensor.dequantize().to(self.dtype)


def pack_unread(model: Any, config: Any) -> None:
    """Give a model with deferred weights bitsandbytes' modules; UnsupportedError, or ConfigError without it."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    if not isinstance(config, BitsAndBytesConfig):
        raise UnsupportedError(
            f"quantization_config={type(config).__name__} does not pack weights as they are read; use "
            "BitsAndBytesConfig, or from_pretrained of transformers and parallelize"
        )
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    try:
        quantizer.validate_environment(device_map={"": "cpu"})
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"quantization_config: {error}; pip install bitsandbytes, or leave it out"
        ) from error
    plain = dict(model.named_modules())
    quantizer.preprocess_model(model, device_map={"": "cpu"})
    for path, module in [*model.named_modules()]:
        if module is not plain.get(path) and isinstance(module, nn.Linear):
            _pack(module, plain[path])
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def _pack(module: Any, plain: Any) -> None:
    """Pack one projection as bitsandbytes does when it moves to a device."""
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    module.bias, weight = plain.bias, module.weight
    numbers = (
        plain.weight.detach()
        if isinstance(plain, nn.Linear)
        else plain.weight.detach().t().contiguous()
    )
    if hasattr(module, "state"):
        packed, scales, _ = int8_vectorwise_quant(numbers.to(torch.float16))
        split_weight(
            module,
            "weight",
            EightBits(type(weight)),
            {"packed": packed, "scales": scales},
        )
        return
    packed, state = quantize_4bit(
        numbers,
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    packing = FourBits(type(weight), state, weight.quant_storage)
    split_weight(module, "weight", packing, packing.parts_of(packed, state))
