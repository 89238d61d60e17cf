"""Functions of transformers that carry a state from token to token: how spans of them are computed, and what they cost.

H heads, K key size, V value size, N state size.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ringspan.core.recurrence.cost import Scan
from ringspan.torch.engine.recurrence import rules

_DELTA_CHUNK: Final = 64  # tokens, in transformers' code and flash-linear-attention's


class StateFunction(NamedTuple):
    rule: rules.Rule
    # counts a module's recurrence, for the planner
    cost: Callable[[Any], Scan]


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


SELECTIVE_SCAN: Final = "mamba_selective_scan"
FUNCTIONS: Final[dict[str, StateFunction]] = {
    "torch_chunk_gated_delta_rule": StateFunction(
        rules.DeltaRule(),
        lambda of: _delta(of.num_v_heads, of.head_k_dim, of.head_v_dim),
    ),
    "mamba2_chunk_scan": StateFunction(
        rules.StateSpaceDual(),
        lambda of: _state_space(
            of.num_heads, of.head_dim, of.ssm_state_size, of.n_groups, of.chunk_size
        ),
    ),
    "chunk_kimi_delta_attention": StateFunction(
        rules.DeltaRule(), lambda of: _delta(of.num_heads, of.head_dim, of.head_dim)
    ),
    SELECTIVE_SCAN: StateFunction(
        rules.SelectiveScan(),
        lambda of: _selective(of.intermediate_size, of.ssm_state_size),
    ),
}
"""By their names in transformers; a family adds others (``Family.states``)."""
