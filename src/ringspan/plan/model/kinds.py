"""Parts of a decoder layer as counted: attention, a state, a convolution, a feed-forward."""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ringspan.core.geometry.layer_mask import CAUSAL, LayerMask
from ringspan.core.recurrence.cost import Scan
from ringspan.core.selection import Index


class Kept(NamedTuple):
    """Numbers of a token that one part of a layer keeps for backward, in the layers' dtype.

    ``norms``: kept by RMS norms besides float32 ``copies`` of inputs, in place of which chunked norms keep ``inputs``.
    Copies and other ``float32`` numbers are in bytes.
    """

    numbers: int = 0
    norms: int = 0
    inputs: int = 0
    copies: int = 0
    float32: int = 0

    def bytes(self, number_bytes: int, *, norms_in_chunks: bool) -> int:
        of_norms = (
            number_bytes * self.inputs
            if norms_in_chunks
            else number_bytes * self.norms + self.copies
        )
        return number_bytes * self.numbers + of_norms + self.float32

    def share(self, ranks: int) -> "Kept":
        return Kept(*(size // ranks for size in self))


PARTS: Final = ("norm", "heads", "feedforward_norm", "feedforward")
"""Parts of ``LayerKind.kept``: up to attention without its result, then up to the feed-forward, then it."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One layer of a decoder.

    ``parameters``: all, of which ``whole`` are not split by tensor parallelism, some ``frozen``, of these some
    ``packed``. ``matrices``: weights that a token is multiplied with (of experts, its own); ``mixing``: those of
    attention or a recurrence; ``feedforward``: those of a feed-forward in ``products`` products, of ``intermediate``
    numbers per token. ``heads``: of queries, 0 without attention; keys have ``head_dim`` numbers, values ``value_dim``,
    and a ring sends ``calls`` times both, or what they are expanded from: ``latent`` numbers for all heads and
    ``rotary`` of each key. ``channels`` are convolved with ``taps`` taps. ``mixed``: numbers per token
    that a recurrence or convolution keeps besides its result. ``linears``: number of linear layers, inputs plus
    outputs, weights. ``shared``: numbers per token that later layers are given, which checkpoints keep. Tokens
    attend to what ``mask`` lets them see, or with an ``index`` to what it chooses. ``caches``:
    keys and values that generation keeps, 0 without attention and of layers that take an earlier one's. A layer takes
    ``streams`` hidden states of a token. ``experts``: their number and all their weights.
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
    latent: int = 0
    rotary: int = 0
    calls: int = 1
    mask: LayerMask = CAUSAL
    kept: tuple[Kept, ...] = (Kept(),) * len(PARTS)
    shared: int = 0
    scan: Scan | None = None
    channels: int = 0
    taps: int = 0
    mixed: int = 0
    linears: tuple[int, int, int] = (0, 0, 0)
    frozen: int = 0
    packed: int = 0
    index: Index | None = None
    caches: int = 1
    streams: int = 1
    experts: tuple[int, int] = (0, 0)

    @property
    def cached(self) -> int:
        """Numbers of a token that a cache keeps for attention, without an index's and without entries."""
        if self.index and not self.index.window:
            return self.caches * round(self.index.token)
        return self.caches * (
            self.latent + self.rotary
            or self.kv_heads * (self.head_dim + self.value_dim)
        )

    @property
    def compressed(self) -> int:
        """Numbers of a latent that can stand for a token's keys and values, 0 if these are fewer."""
        size = self.latent + self.rotary
        return size if size < self.kv_heads * (self.head_dim + self.value_dim) else 0

    @property
    def expansion(self) -> int:
        """Weights that turn a latent into keys and values."""
        return self.latent * self.heads * (self.head_dim - self.rotary + self.value_dim)

    @property
    def idle(self) -> int:
        """Weights of the experts that a token does not use."""
        return max(0, self.mixing + self.feedforward - self.matrices)

    @property
    def chosen(self) -> float:
        """Share of the experts that a token is sent to."""
        return 1 - self.idle / self.experts[1] if self.experts[1] else 0.0

    @property
    def trained(self) -> int:
        return self.parameters - self.frozen

    @property
    def attends(self) -> bool:
        return self.heads > 0

    @property
    def out_size(self) -> int:
        return self.heads * self.value_dim

    @property
    def halo(self) -> int:
        return max(0, self.taps - 1)

    @property
    def scan_flops(self) -> float:
        return self.scan.flops if self.scan else 0.0

    def adapted(self, rank: int, *, is_packed: bool) -> "LayerKind":
        """Return the layer frozen, and packed if so, with adapters of ``rank`` on its linear layers."""
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
        """Return one tensor-parallel rank's share: heads, feed-forward and their weights, and all of ``whole``."""
        sizes = (
            "matrices",
            "feedforward",
            "intermediate",
            "mixing",
            "heads",
            "kv_heads",
            "shared",
        )
        norm, heads, feedforward_norm, feedforward = self.kept
        return replace(
            self,
            parameters=self.whole + (self.parameters - self.whole) // tp,
            frozen=self.frozen and self.whole + (self.frozen - self.whole) // tp,
            kept=(norm, heads.share(tp), feedforward_norm, feedforward.share(tp)),
            experts=(self.experts[0], self.experts[1] // tp),
            **{name: getattr(self, name) // tp for name in sizes},
        )


@dataclass(frozen=True)
class Growth:
    """A cost of n units at once: ``constant + units n + pairs n^2`` (images side by side under a mask: Pixtral)."""

    constant: int = 0
    units: int = 0
    pairs: int = 0

    @classmethod
    def through(cls, two: int, three: int, four: int | None = None) -> "Growth":
        """Return the growth through the values of 2, 3 and, unless linear, 4 units; a single unit copies less."""
        pairs = 0 if four is None else (four - 2 * three + two) // 2
        units = three - two - 5 * pairs
        return cls(two - 2 * units - 4 * pairs, units, pairs)

    def at(self, count: int) -> int:
        return (
            self.constant + self.units * count + self.pairs * count**2 if count else 0
        )


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A tower and its projector on the images, frames or windows of one sequence.

    ``units``: what it treats by itself (pairs of frames if it joins two). ``tokens``: the text's for what it makes;
    ``row``: numbers placed on one, in deeper layers too. ``pixels``: numbers given. ``flops``: forward and backward.
    ``saved``, ``checkpointed``: bytes kept for backward without and with checkpoints of its ``layers``.
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
        """Units of the fullest rank; at least one, since all ranks gather the weights together."""
        return -(-batch * self.units // ranks)
