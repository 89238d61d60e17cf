"""What a decoder layer is made of, as the planner counts it: attention, a state, a convolution, a feed-forward."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scan:
    """A layer's recurrence, per sequence or per token of one.

    ``state`` and ``map_``: numbers of a state S and of the map A that comes with it where spans are scanned in rounds
    (``ringspan.core.recurrence.scan``). ``flops``: of a token in forward, in chunks as kernels compute it. ``out``:
    numbers of a token's result. ``chunk_states``: numbers of the states that a kernel keeps for backward, per token.
    """

    state: int
    map_: int
    flops: float
    out: int
    chunk_states: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One layer of a decoder.

    ``parameters``: all of them. ``matrices``: weights that a token is multiplied with, of experts those that it is sent
    to. ``feedforward``: the weights of ``parameters`` that are of a feed-forward, ``intermediate`` the numbers of a
    token in it. ``channels`` are convolved with ``taps`` taps. ``mixed``: numbers of a token that a recurrence or
    convolution keeps for backward beside its result.
    """

    parameters: int
    matrices: int
    feedforward: int
    intermediate: int
    attends: bool = True
    window: int | None = None
    scan: Scan | None = None
    channels: int = 0
    taps: int = 0
    mixed: int = 0

    @property
    def halo(self) -> int:
        """Tokens before a span that its convolution needs."""
        return max(0, self.taps - 1)

    @property
    def scan_flops(self) -> float:
        """FLOPs of a token's recurrence in forward."""
        return self.scan.flops if self.scan else 0.0
