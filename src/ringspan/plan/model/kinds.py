"""Parts of a decoder layer as the planner counts them: attention, a state, a convolution, a feed-forward."""

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


@dataclass(frozen=True)
class Growth:
    """A cost of n units that a tower takes at once: ``constant + units n + pairs n^2``.

    ``pairs`` is of towers that lay images beside each other and mask what is outside of each (Pixtral).
    """

    constant: int = 0
    units: int = 0
    pairs: int = 0

    @classmethod
    def through(cls, two: int, three: int, four: int | None = None) -> "Growth":
        """Return the growth with these values; along a line without the last.

        The first is left out: what is repeated per unit is not copied for a single one.
        """
        pairs = 0 if four is None else (four - 2 * three + two) // 2
        units = three - two - 5 * pairs
        return cls(two - 2 * units - 4 * pairs, units, pairs)

    def at(self, count: int) -> int:
        return self.constant + self.units * count + self.pairs * count**2 if count else 0


@dataclass(frozen=True, kw_only=True)
class Tower:
    """Output and cost of a tower and its projector for the images, frames or windows of one sequence.

    ``units``: images, frames (pairs of frames where a tower joins two) or windows, each of which it treats by itself.
    ``tokens``: of the text, that stand for what it makes. ``row``: numbers in what is placed on one of them, in deeper
    layers too. ``pixels``: numbers that it is given. ``flops``: forward and backward. ``saved`` and ``checkpointed``:
    bytes kept for backward, without and with checkpoints of its ``layers``.
    """

    modality: str
    units: int
    tokens: int
    row: int
    pixels: int
    flops: Growth
    saved: Growth
    checkpointed: Growth
    layers: int

    def share(self, batch: int, ranks: int) -> int:
        """Units of the rank that has most; each has at least one, since the weights are gathered by all together."""
        return -(-batch * self.units // ranks)

    def share_of_tokens(self, batch: int, ranks: int) -> float:
        """Embeddings of that rank."""
        return self.share(batch, ranks) * self.tokens / self.units
