"""Recurrences of a layer, from transformers' modules. H heads, K key size, V value size, N state size."""

from collections.abc import Callable
from typing import Any, Final

from torch import nn

from ringspan.core.errors import UnsupportedError
from ringspan.plan.model.kinds import Scan
from ringspan.torch.model.recurrent import functions_of

_DELTA_CHUNK: Final = 64  # tokens, in transformers' code and flash-linear-attention's


def scan_of(module: nn.Module, where: str) -> Scan | None:
    """Return a module's recurrence; None if it only convolves."""
    names = functions_of(module)
    for name, scan in _SCANS.items():
        if name in names:
            return scan(module)
    if names == ("causal_conv1d_fn",):
        return None
    raise UnsupportedError(
        f"{where} computes {', '.join(names)}, which the planner does not count; use --trace"
    )


def _delta(heads: int, key: int, value: int) -> Scan:
    """Count per head, in a chunk of c tokens.

    Keys and queries by keys (4 c K), the triangular system (c (K + V)), scores by values (2 c V); keys and queries by
    the state, and its update (6 K V).
    """
    c = _DELTA_CHUNK
    flops = heads * (4 * c * key + c * (key + value) + 2 * c * value + 6 * key * value)
    state = heads * key * value
    return Scan(
        state=state,
        map_=heads * key * key,
        flops=flops,
        out=heads * value,
        chunk_states=state / c,
    )


def _state_space(heads: int, size: int, states: int, groups: int, chunk: int) -> Scan:
    """Count in a chunk of c tokens: C by B per group (2 c N), scores by inputs (2 c V); per head the state (4 V N)."""
    flops = 2 * chunk * states * groups + heads * (2 * chunk * size + 4 * size * states)
    state = heads * size * states
    return Scan(
        state=state,
        map_=heads,
        flops=flops,
        out=heads * size,
        chunk_states=state / chunk,
    )


def _selective(channels: int, states: int) -> Scan:
    return Scan(
        state=channels * states,
        map_=channels * states,
        flops=6.0 * channels * states,
        out=channels,
    )


def _lightning(heads: int, size: int, block: int) -> Scan:
    """Count per head, in a block of c tokens: queries by keys, scores by values (4 c K), the state (4 K K)."""
    state = heads * size * size
    flops = heads * (4 * block * size + 4 * size * size)
    return Scan(
        state=state,
        map_=heads,
        flops=flops,
        out=heads * size,
        chunk_states=state / block,
    )


# Keys are the functions of transformers that modules call.
_SCANS: Final[dict[str, Callable[[Any], Scan]]] = {
    "torch_chunk_gated_delta_rule": lambda of: _delta(
        of.num_v_heads, of.head_k_dim, of.head_v_dim
    ),
    "mamba2_chunk_scan": lambda of: _state_space(
        of.num_heads, of.head_dim, of.ssm_state_size, of.n_groups, of.chunk_size
    ),
    "chunk_kimi_delta_attention": lambda of: _delta(
        of.num_heads, of.head_dim, of.head_dim
    ),
    "mamba_selective_scan": lambda of: _selective(
        of.intermediate_size, of.ssm_state_size
    ),
    "lightning_attention": lambda of: _lightning(
        of.num_attention_heads, of.head_dim, of.block_size
    ),
}
