"""Layers with a state as functions of tensors: transformers' own, in float64 or float32, and random inputs for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ringspan.torch.engine.recurrence.rules import (
    DeltaRule,
    Lightning,
    Rule,
    SelectiveScan,
    StateSpaceDual,
    lightning_attention,
)
from tests.core.recurrence import reference
from tests.torch.engine.recurrence.models import module_of


class Layer(NamedTuple):
    rule: Rule
    kind: str
    """The model whose module has the function."""
    function: str
    oracle: Callable[..., Any]
    """Outputs of one document, by numpy, from the same arguments."""

    def of(self, dtype: torch.dtype) -> Callable[..., Any]:
        if not self.kind:
            return lightning_attention
        return module_of(self.kind, dtype)[self.function]


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _decays(generator: torch.Generator, *shape: int) -> Tensor:
    """Logarithms of decays from near 0 to near 1."""
    return -(_normal(generator, *shape) * 3 - 2).exp()


def inputs(
    name: str, rows: int, tokens: int, *, seed: int = 0, heads: int = 2, size: int = 4
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, tokens, heads)
    if name in ("gated delta rule", "kimi delta attention"):
        channels = (size,) if name.startswith("kimi") else ()
        return {
            "query": _normal(generator, *shape, size),
            "key": normalize(_normal(generator, *shape, size), dim=-1),
            "value": _normal(generator, *shape, size + 1),
            "g": _decays(generator, *shape, *channels),
            "beta": _normal(generator, *shape).sigmoid(),
        }
    if name == "mamba-2":
        return {
            "hidden_states": _normal(generator, *shape, size),
            "dt": _normal(generator, *shape),
            "A": -_normal(generator, heads).exp(),
            "B": _normal(generator, rows, tokens, 1, size + 1),
            "C": _normal(generator, rows, tokens, 1, size + 1),
            "chunk_size": 8,
            "D": _normal(generator, heads),
            "dt_bias": _normal(generator, heads),
            "dt_softplus": True,
            "dt_limit": (0.01, 3.0),
        }
    if name == "mamba":
        return {
            "hidden_states": _normal(generator, rows, size, tokens),
            "dt": _normal(generator, rows, size, tokens),
            "A": -_normal(generator, size, 3).exp(),
            "B": _normal(generator, rows, 3, tokens),
            "C": _normal(generator, rows, 3, tokens),
            "D": _normal(generator, size),
            "z": _normal(generator, rows, size, tokens),
            "delta_bias": _normal(generator, size),
            "delta_softplus": True,
        }
    return {
        "query": _normal(generator, rows, heads, tokens, size),
        "key": _normal(generator, rows, heads, tokens, size),
        "value": _normal(generator, rows, heads, tokens, size + 1),
        "slopes": -_decays(generator, heads),
        "block_tokens": 8,
    }


def _numpy(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.numpy() if isinstance(x, Tensor) else x for name, x in arguments.items()
    }


def _delta(arguments: dict[str, Any]) -> Any:
    x = _numpy(arguments)
    return reference.delta_rule(x["query"], x["key"], x["value"], x["g"], x["beta"])


def _dual(arguments: dict[str, Any]) -> Any:
    x = _numpy(arguments)
    dt = np.clip(np.logaddexp(0, x["dt"] + x["dt_bias"]), *x["dt_limit"])
    b, c = (np.repeat(x[name], x["dt"].shape[2], 2) for name in "BC")
    return reference.state_space_dual(x["hidden_states"], dt, x["A"], b, c, x["D"])


def _selective(arguments: dict[str, Any]) -> Any:
    x = _numpy(arguments)
    dt = np.logaddexp(0, x["dt"] + x["delta_bias"][:, None])
    out, state = reference.selective_scan(
        x["hidden_states"], dt, x["A"], x["B"], x["C"], x["D"]
    )
    return out * x["z"] / (1 + np.exp(-x["z"])), state


def _lightning(arguments: dict[str, Any]) -> Any:
    x = _numpy(arguments)
    return reference.lightning_attention(x["query"], x["key"], x["value"], x["slopes"])


LAYERS = {
    "gated delta rule": Layer(
        DeltaRule(), "qwen3_next", "torch_chunk_gated_delta_rule", _delta
    ),
    "kimi delta attention": Layer(
        DeltaRule(), "kimi_linear", "chunk_kimi_delta_attention", _delta
    ),
    "mamba-2": Layer(StateSpaceDual(), "bamba", "mamba2_chunk_scan", _dual),
    "mamba": Layer(SelectiveScan(), "mamba", "mamba_selective_scan", _selective),
    "lightning attention": Layer(Lightning(), "", "", _lightning),
}
