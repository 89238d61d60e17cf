"""Parts of a decoder layer as the planner counts them: attention, a state, a convolution, a feed-forward."""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple


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


class Kept(NamedTuple):
    """Numbers that one part of a layer keeps of a token for backward, in the dtype that layers compute in.

    ``norms`` are those that RMS norms keep besides float32 ``copies`` of their inputs; norms that run in chunks keep
    their ``inputs`` in place of both. Copies and other ``float32`` numbers are in bytes.
    """

    numbers: int = 0
    norms: int = 0
    inputs: int = 0
    copies: int = 0
    float32: int = 0

    def bytes(self, number_bytes: int, *, norms_in_chunks: bool) -> int:
        of_norms = number_bytes * self.inputs if norms_in_chunks else number_bytes * self.norms + self.copies
        return number_bytes * self.numbers + of_norms + self.float32

    def share(self, ranks: int) -> "Kept":
        return Kept(*(size // ranks for size in self))


PARTS: Final = ("norm", "heads", "feedforward_norm", "feedforward")
"""Parts of ``LayerKind.kept``: up to attention without its result, then up to the feed-forward, then it."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One layer of a decoder.

    ``parameters``: all of them, ``whole`` those that tensor parallelism does not split. ``matrices``: weights that a
    token is multiplied with, of experts those that it is sent to. ``mixing``: weights of attention or a recurrence.
    ``feedforward``: those of a feed-forward, which are in ``products`` products; ``intermediate``: the numbers of a
    token in it. ``heads`` are those of queries, 0 without attention; keys have ``head_dim`` numbers, as queries do, and
    values ``value_dim``, as attention is given them ``calls`` times, which is what a ring sends. ``channels`` are
    convolved with ``taps`` taps. ``mixed``: numbers of a token that a recurrence or convolution keeps for backward
    besides its result. ``linears``: number of linear layers, their inputs and outputs together, and their weights. Of
    ``parameters`` some may be ``frozen``, of these some ``packed``. With ``chunks``, tokens attend in consecutive
    chunks of ``window``.
    """

    parameters: int
    matrices: int
    feedforward: int
    intermediate: int
    mixing: int = 0
    whole: int = 0
    products: int = 3
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    calls: int = 1
    window: int | None = None
    chunks: bool = False
    kept: tuple[Kept, ...] = (Kept(),) * len(PARTS)
    scan: Scan | None = None
    channels: int = 0
    taps: int = 0
    mixed: int = 0
    linears: tuple[int, int, int] = (0, 0, 0)
    frozen: int = 0
    packed: int = 0

    @property
    def trained(self) -> int:
        return self.parameters - self.frozen

    @property
    def attends(self) -> bool:
        return self.heads > 0

    @property
    def out_size(self) -> int:
        """Numbers of a token in a result of attention."""
        return self.heads * self.value_dim

    @property
    def halo(self) -> int:
        """Tokens before a span that its convolution needs."""
        return max(0, self.taps - 1)

    @property
    def scan_flops(self) -> float:
        """FLOPs of a token's recurrence in forward."""
        return self.scan.flops if self.scan else 0.0

    def adapted(self, rank: int, *, is_packed: bool) -> "LayerKind":
        """Return the layer frozen, with matrices of a rank next to its linear layers, which may be packed."""
        (count, sizes, weights), (norm, heads, *others) = self.linears, self.kept
        return replace(
            self,
            parameters=self.parameters + rank * sizes,
            matrices=self.matrices + rank * sizes,
            kept=(norm, heads._replace(numbers=heads.numbers + rank * count), *others),
            frozen=self.parameters,
            packed=weights if is_packed else 0,
        )

    def share(self, tp: int) -> "LayerKind":
        """Return one tensor-parallel rank's share; sizes divide evenly."""
        sizes = ("matrices", "feedforward", "intermediate", "mixing", "heads", "kv_heads")
        norm, heads, feedforward_norm, feedforward = self.kept
        return replace(
            self,
            parameters=self.whole + (self.parameters - self.whole) // tp,
            frozen=self.frozen and self.whole + (self.frozen - self.whole) // tp,
            kept=(norm, heads.share(tp), feedforward_norm, feedforward.share(tp)),
            **{name: getattr(self, name) // tp for name in sizes},
        )


@dataclass(frozen=True)
class Growth:
    """A cost of n units that a tower takes at once: ``constant + units n + pairs n^2``.

    ``pairs`` is of towers that lay images next to each other and mask what is outside of each (Pixtral).
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
