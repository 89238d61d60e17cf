"""Layers with a state, and convolutions, over a sequence split over a mesh axis, inside ``shard_map``."""

from ringspan.jax.recurrence.layers import (
    causal_convolution,
    delta_rule,
    lightning_attention,
    selective_scan,
    state_space_dual,
)
from ringspan.jax.recurrence.scan import scan_states

__all__ = [
    "causal_convolution",
    "delta_rule",
    "lightning_attention",
    "scan_states",
    "selective_scan",
    "state_space_dual",
]
