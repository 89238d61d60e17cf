"""Masks of allowed (query, key) pairs: disjoint regions, closed under ``&`` and ``|``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import MaskError
from ringspan.core.messages.numbers import LARGEST_INTEGER, described, integer, is_a

UNBOUNDED: Final = LARGEST_INTEGER


FORMS: Final = (
    "make a mask with rs.causal(), rs.full(), rs.sliding_window(4096), rs.prefix_lm(512), rs.documents([700, 1300]), "
    "rs.chunked(8192, length=S) or rs.frames([256] * 16), and combine them with & and |"
)


class Region(NamedTuple):
    """Global positions q in [q0, q1) x k in [k0, k1) with ``lo <= q - k <= hi``."""

    q0: int = 0
    q1: int = UNBOUNDED
    k0: int = 0
    k1: int = UNBOUNDED
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED

    @property
    def is_empty(self) -> bool:
        lo = max(self.lo, self.q0 - (self.k1 - 1))
        hi = min(self.hi, self.q1 - 1 - self.k0)
        return self.q0 >= self.q1 or self.k0 >= self.k1 or lo > hi


def _intersect(a: Region, b: Region) -> Region:
    return Region(
        max(a.q0, b.q0),
        min(a.q1, b.q1),
        max(a.k0, b.k0),
        min(a.k1, b.k1),
        max(a.lo, b.lo),
        min(a.hi, b.hi),
    )


def _subtract(a: Region, b: Region) -> Iterator[Region]:
    """Yield ``a`` without ``b`` as disjoint regions: queries outside b, then keys, then diagonals."""
    both = _intersect(a, b)
    if both.is_empty:
        yield a
        return
    inside_queries = a._replace(q0=both.q0, q1=both.q1)
    inside = inside_queries._replace(k0=both.k0, k1=both.k1)
    pieces = (
        a._replace(q1=both.q0),
        a._replace(q0=both.q1),
        inside_queries._replace(k1=both.k0),
        inside_queries._replace(k0=both.k1),
        inside._replace(hi=both.lo - 1),
        inside._replace(lo=both.hi + 1),
    )
    yield from (piece for piece in pieces if not piece.is_empty)


@dataclass(frozen=True)
class Mask:
    """Allowed pairs as disjoint regions, made by ``causal()`` and its siblings and combined with ``&`` and ``|``.

    ``name`` is for people; equality and hash ignore it. MaskError for anything but a tuple of regions.
    """

    regions: tuple[Region, ...]
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not is_a(self.regions, tuple):
            raise MaskError(
                f"a mask is a tuple of regions, got {described(self.regions)}; {FORMS}"
            )

    @cached_property
    def _hash(self) -> int:
        return hash(self.regions)

    # Hashed once, since there may be thousands of regions and caches ask for every layer.
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def overlap(self) -> tuple[Region, Region] | None:
        """Two regions that allow the same pair, whose score would count twice, or None."""
        # Sweep in the order of the first query and keep only regions whose queries may still meet the next one's: one,
        # for packed documents.
        near: list[Region] = []
        for region in sorted(region for region in self.regions if not region.is_empty):
            near = [other for other in near if other.q1 > region.q0]
            for other in near:
                if not _intersect(other, region).is_empty:
                    return other, region
            near.append(region)
        return None

    def __and__(self, other: "Mask") -> "Mask":
        if not is_a(other, Mask):
            return NotImplemented
        pairs = (_intersect(a, b) for a in self.regions for b in other.regions)
        return Mask(
            tuple(region for region in pairs if not region.is_empty),
            f"({self.name} & {other.name})",
        )

    def __or__(self, other: "Mask") -> "Mask":
        if not is_a(other, Mask):
            return NotImplemented
        extra: list[Region] = list(other.regions)
        for taken in self.regions:
            extra = [piece for region in extra for piece in _subtract(region, taken)]
        return Mask(self.regions + tuple(extra), f"({self.name} | {other.name})")

    def __str__(self) -> str:
        return self.name or self.spec

    @property
    def spec(self) -> str:
        """Text that ``Mask.parse`` reads, equal for equal masks: a name, else regions without loose bounds."""
        match self.regions:
            case (only,) if only == Region():
                return "full"
            case (only,) if only == Region(lo=0):
                return "causal"
            case (only,) if only == Region(lo=0, hi=only.hi):
                return f"window:{only.hi + 1}"
            case _:
                pass
        return "regions:" + ";".join(
            ",".join("" if abs(bound) >= UNBOUNDED else str(bound) for bound in region)
            for region in self.regions
        )

    @staticmethod
    def parse(text: str) -> "Mask":
        """Read ``causal``, ``full``, ``window:W``, ``prefix:P``, ``documents:L1,...``, ``frames:L1,...`` or a ``spec``.

        MaskError for another form, or regions that overlap.
        """
        if not is_a(text, str):
            raise MaskError(
                f"the text of a mask must be a str, got {described(text)}; {FORMS}"
            )
        kind, _, rest = text.partition(":")
        try:
            if kind == "regions":
                mask = Mask(
                    tuple(_parse_region(part) for part in rest.split(";") if part), text
                )
                mask.check_disjoint()
                return mask
            numbers = [int(number) for number in rest.split(",")] if rest else []
        except MaskError:
            raise
        except ValueError:
            raise MaskError(
                f"cannot read the mask {text!r}: its numbers must be integers"
            ) from None
        match kind, numbers:
            case "causal", []:
                return causal()
            case "full", []:
                return full()
            case "window", [window]:
                return sliding_window(window)
            case "prefix", [prefix]:
                return prefix_lm(prefix)
            case "documents", [_, *_]:
                return documents(numbers)
            case "frames", [_, *_]:
                return frames(numbers)
            case _:
                raise MaskError(
                    f"unknown mask {text!r}; write causal, full, window:4096, prefix:512, documents:700,1300 or "
                    "frames:256,256"
                )

    def check_disjoint(self) -> None:
        """Raise MaskError for overlapping regions."""
        if self.overlap:
            one, other = (Mask((region,)).spec for region in self.overlap)
            raise MaskError(
                f"two regions of the mask overlap: {one} and {other}; combine masks with | instead"
            )

    def table(self, num_queries: int, num_keys: int) -> NDArray[np.int64]:
        """Return the non-empty regions clipped to that size: columns q0, q1, k0, k1, lo, hi. Shape (R, 6)."""
        # Flattened to numbers, which is faster than tuple by tuple for thousands of regions.
        rows = np.fromiter(
            chain.from_iterable(self.regions), np.int64, 6 * len(self.regions)
        ).reshape(-1, 6)
        rows[:, 1] = np.minimum(rows[:, 1], num_queries)
        rows[:, 3] = np.minimum(rows[:, 3], num_keys)
        return rows[(rows[:, 0] < rows[:, 1]) & (rows[:, 2] < rows[:, 3])]

    def dense(
        self, query_positions: NDArray[np.int64], key_positions: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return a boolean matrix (queries, keys) for these positions; MaskError for overlapping regions."""
        # Regions are counted, as a logical or would not notice overlaps.
        q, k = query_positions[:, None], key_positions[None, :]
        counts = np.zeros((len(query_positions), len(key_positions)), dtype=np.int64)
        for q0, q1, k0, k1, lo, hi in self.regions:
            counts += (
                (q0 <= q)
                & (q < q1)
                & (k0 <= k)
                & (k < k1)
                & (lo <= q - k)
                & (q - k <= hi)
            )
        if (counts > 1).any():
            raise MaskError(
                f"the regions of mask {self} overlap; combine masks with | instead of listing regions"
            )
        return counts.astype(np.bool_)


def _parse_region(text: str) -> Region:
    fields = text.split(",")
    if len(fields) != 6:
        raise MaskError(f"a region must be six numbers q0,q1,k0,k1,lo,hi; got {text!r}")
    region = Region(
        *(
            int(field) if field else default
            for field, default in zip(fields, Region(), strict=True)
        )
    )
    if max(map(abs, region)) > UNBOUNDED:
        raise MaskError(f"the numbers of a region are at most 2**60, got {text!r}")
    return region


def full() -> Mask:
    """Let every query see every key (bidirectional, cross-attention)."""
    return Mask((Region(),), "full")


def causal() -> Mask:
    """Let query q see keys ``k <= q``."""
    return Mask((Region(lo=0),), "causal")


def sliding_window(window: int, *, global_tokens: int = 0) -> Mask:
    """Let query q see keys with ``0 <= q - k < window``, and the first ``global_tokens``; MaskError if too small."""
    window = integer(window, "window", MaskError, at_least=1)
    global_tokens = integer(global_tokens, "global_tokens", MaskError, at_least=0)
    local = Mask((Region(lo=0, hi=window - 1),), f"window:{window}")
    if global_tokens == 0:
        return local
    return local | Mask((Region(k1=global_tokens, lo=0),), f"global:{global_tokens}")


def prefix_lm(prefix: int) -> Mask:
    """Let every query see the first ``prefix`` keys, then causally (Raffel et al. 2020); MaskError if negative."""
    prefix = integer(prefix, "prefix", MaskError, at_least=0)
    # Split by key, not by query: the two regions share no pair, and each has one bound on q - k.
    seen = (Region(k1=prefix),) if prefix else ()
    return Mask((*seen, Region(k0=prefix, lo=0)), f"prefix:{prefix}")


def documents(
    lengths: Sequence[int] | Iterable[int],
    *,
    window: int | None = None,
    is_causal: bool = True,
) -> Mask:
    """Let a query see the keys of its own document, causal by default, at most the last ``window``.

    Positions past the last document see nothing. MaskError for no document, an empty one, a window below one, or a
    window that is not causal.
    """
    lengths = _document_lengths(lengths)
    window = None if window is None else integer(window, "window", MaskError)
    if not is_a(is_causal, bool):
        raise MaskError(f"is_causal must be True or False, got {described(is_causal)}")
    if not lengths or min(lengths) < 1:
        raise MaskError(
            f"documents need at least one length and each at least one token, got {lengths[:8]}"
        )
    if window is not None and (window < 1 or not is_causal):
        raise MaskError(
            f"a document window must be causal and hold at least one token, got window={window}"
        )
    lo = 0 if is_causal else -UNBOUNDED
    hi = UNBOUNDED if window is None else window - 1
    ends = np.cumsum(lengths).tolist()
    regions = (
        Region(end - n, end, end - n, end, lo, hi)
        for n, end in zip(lengths, ends, strict=True)
    )
    shown = (
        ",".join(map(str, lengths))
        if len(lengths) <= 8
        else f"{len(lengths)} documents"
    )
    return Mask(
        tuple(regions), f"documents:{shown}" + (f" & window:{window}" if window else "")
    )


def frames(
    lengths: Sequence[int] | Iterable[int], *, window: int | None = None
) -> Mask:
    """Let a query see its own frame, both ways, and earlier ones; in all at most ``window`` frames (video models).

    With f(i) the frame of position i: ``f(k) <= f(q)`` and ``f(q) - f(k) < window``. Later positions see nothing.
    MaskError for no frame, an empty one, or a window below one.
    """
    lengths = _document_lengths(lengths)
    window = len(lengths) if window is None else integer(window, "window", MaskError)
    if not lengths or min(lengths) < 1:
        raise MaskError(
            f"frames need at least one length and each at least one token, got {lengths[:8]}"
        )
    if window < 1:
        raise MaskError(
            f"a window of frames must hold at least one, got window={window}"
        )
    ends = [0, *np.cumsum(lengths).tolist()]
    regions = (
        Region(ends[i], ends[i + 1], ends[max(0, i + 1 - window)], ends[i + 1])
        for i in range(len(lengths))
    )
    shown = (
        ",".join(map(str, lengths)) if len(lengths) <= 8 else f"{len(lengths)} frames"
    )
    return Mask(
        tuple(regions),
        f"frames:{shown}" + (f" & window:{window}" if window < len(lengths) else ""),
    )


def _document_lengths(lengths: Iterable[Any]) -> list[int]:
    if is_a(lengths, str) or not hasattr(lengths, "__iter__"):
        raise MaskError(
            f"a list of lengths such as [700, 1300] is needed, got {described(lengths)}"
        )
    return [integer(length, "a document's length", MaskError) for length in lengths]


def chunked(size: int, *, length: int) -> Mask:
    """Return Llama 4's causal attention within chunks of ``size`` tokens; MaskError for sizes below one."""
    size, length = (
        integer(*each, MaskError, at_least=1)
        for each in ((size, "size"), (length, "length"))
    )
    # Chunks are documents of one length, except that the last may be shorter.
    whole, rest = divmod(length, size)
    return Mask(
        documents([size] * whole + ([rest] if rest else [])).regions, f"chunked:{size}"
    )
