"""Models of transformers that compute in float64 all through: their own code says float32 in many places."""

import builtins
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any, Final

import torch
from transformers import AutoModel

_OF_MODELS: Final = ("transformers.models.", "transformers_modules.")
_AUTO: Final = "transformers.models.auto."
_ROUNDING: Final = 1e-5
"""Relative error of a number that was computed in float32."""


def in_float64(kind: type) -> dict[str, Any]:
    """Return what the module of a class has, made again from its source with float64 wherever that says float32.

    An index chooses the first of equal scores. Modules of models that it takes classes from are made again too.
    """
    return _wide(kind.__module__)


@lru_cache
def _wide(name: str) -> dict[str, Any]:
    """Run an imported module's code again with float64 in place of float32, and return its names."""
    module = sys.modules[name]
    with open(str(module.__file__), encoding="utf-8") as file:
        source = file.read()
    source = re.sub(
        r"\btorch\.float(32)?\b",
        "torch.float64",
        source.replace(".float()", ".double()"),
    )
    # ``torch.full`` makes the default dtype, which does not hold the smallest float64.
    smallest = r"(torch\.full\(\(\), torch\.finfo\((\w+)\.dtype\)\.min)"
    source = re.sub(smallest, r"\1, dtype=\2.dtype", source)
    # torch takes any of equal scores, and which one may depend on the length of the row.
    ordered = r"\1.sort(dim=\3, descending=True, stable=True).indices.narrow(\3, 0, \2)"
    source = re.sub(r"(\w*scores)\.topk\((.+), dim=(-?\d)\)\.indices", ordered, source)
    copy = types.ModuleType(module.__name__)
    copy.__package__, copy.__file__ = module.__package__, module.__file__
    vars(copy)["__builtins__"] = vars(builtins) | {"__import__": _import}
    # The file is the one that Python has imported already.
    exec(compile(source, str(module.__file__), "exec"), vars(copy))  # noqa: S102
    vars(copy)["AutoModel"] = _Auto
    return vars(copy)


def _import(
    name: str,
    globals: Any = None,
    locals: Any = None,
    names: tuple[str, ...] = (),
    level: int = 0,
) -> Any:
    """Import like Python, but what other models' modules define from the copies that compute in float64."""
    found = builtins.__import__(name, globals, locals, names, level)
    wide = {each: _widened(getattr(found, each, None), each) for each in names or ()}
    wide = {each: value for each, value in wide.items() if value is not None}
    if not wide:
        return found
    plain = {each: getattr(found, each) for each in names if each not in wide}
    return types.SimpleNamespace(**wide, **plain)


def _widened(value: Any, name: str) -> Any:
    """Return the float64 copy of a class or function of a model's module; other values have no copy."""
    path = getattr(value, "__module__", None) or ""
    is_model = path.rpartition(".")[2].startswith("modeling_")
    if not (is_model and path.startswith(_OF_MODELS)) or path.startswith(_AUTO):
        return None
    return _wide(path).get(name) if isinstance(value, type | FunctionType) else None


class _Auto:
    """Maker of the models inside of others, in float64 too."""

    @staticmethod
    def from_config(config: Any) -> Any:
        kind: Any = AutoModel._model_mapping[type(config)]
        return in_float64(kind)[kind.__name__](config)


def in_float64_of(model: Any) -> Any:
    """Return a copy of a model, with its weights, that computes in float64."""
    with _by_default(torch.float64):
        wide = in_float64(type(model))[type(model).__name__](model.config).double()
    made = {name: buffer.clone() for name, buffer in wide.named_buffers()}
    wide.load_state_dict(model.state_dict())
    for name, buffer in wide.named_buffers():
        if not buffer.is_floating_point():
            continue
        # A table that the model has computed is rounded in its state, unlike the one made here.
        is_rounded = torch.isclose(buffer, made[name], rtol=_ROUNDING, atol=0)
        buffer.copy_(torch.where(is_rounded, made[name], buffer))
    return wide.train(model.training)


@contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of a dtype unless the code names another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
