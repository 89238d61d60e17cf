"""Costs of a layer's recurrence, in numbers of a sequence or a token."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scan:
    """A layer's recurrence in numbers per sequence (``state``, ``map_``) or token.

    ``map_`` is of the map that comes with a state where spans are scanned in rounds (``core.recurrence.scan``).
    ``flops``: of forward, in chunks; ``out``: the result; ``chunk_states``: what a kernel keeps for backward.
    """

    state: int
    map_: int
    flops: float
    out: int
    chunk_states: float = 0.0
