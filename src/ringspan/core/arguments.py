"""Checks of attention's arguments, common to all back ends."""

from collections.abc import Sequence
from typing import Final

from ringspan.core.errors import LayoutError, MaskError, UnsupportedError
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import FORMS, Mask, causal
from ringspan.core.messages.numbers import described, integer, is_a, real
from ringspan.core.names import LayoutName

# Tokens of a feed-forward's block that costs nothing. Each block adds its weight gradients to float32 sums: it has
# enough tokens that this takes little time next to its matrix products, and few enough that it is small next to what
# the ring holds in backward.
FREE_CHUNK_TOKENS: Final = 4096
# Default block of norms, used from this number of local tokens on. A block's temporaries stay in a CPU's cache, which
# pays at 32K tokens and not at 8K: there only the cost of recomputing remains.
FREE_NORM_TOKENS: Final = 4 * FREE_CHUNK_TOKENS

# Generation reads a prompt in chunks of PREFILL_TOKENS per rank, so that a chunk's temporaries stay small next to a
# long cache. Below SPLIT_FROM_TOKENS new tokens, every rank computes all of them: one message per layer instead of N.
PREFILL_TOKENS: Final = 4096
SPLIT_FROM_TOKENS: Final = 32

_LAYOUT_HINT: Final = 'pass rs.Layout("zigzag", length=S, ranks=N)'


def is_split(count: int, ranks: int) -> bool:
    """Return True if ``count`` new tokens over a cache are split over a ring, not computed by all."""
    return ranks > 1 and count >= max(SPLIT_FROM_TOKENS, 2 * ranks)


def check_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> None:
    """Raise UnsupportedError unless q (B, H, T, D), k (B, G, T', D), v (B, G, T', E), G dividing H."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise UnsupportedError(
                f"{name} must be (batch, heads, tokens, head_dim), got shape {tuple(shape)}"
            )
        if 0 in shape:
            raise UnsupportedError(
                f"{name} is empty: its shape is {tuple(shape)}; give it at least one entry"
            )
    if k[:3] != v[:3] or k[0] != q[0] or k[3] != q[3]:
        raise UnsupportedError(
            f"shapes do not fit: q {tuple(q)}, k {tuple(k)}, v {tuple(v)}; batch must agree, "
            "q and k in head_dim, k and v in heads and tokens"
        )
    if q[1] % k[1]:
        raise UnsupportedError(
            f"{k[1]} key/value heads do not divide {q[1]} query heads, but must"
        )


def check_scores(scale: float | None, softcap: float | None) -> None:
    if scale is not None:
        real(scale, "scale", UnsupportedError)
    if softcap is not None and not real(softcap, "softcap", UnsupportedError) > 0:
        raise UnsupportedError(
            f"softcap must be positive and finite, or None for none, got {softcap}"
        )


def find_mask(mask: Mask | str | None) -> Mask:
    if mask is None:
        return causal()
    if isinstance(mask, str):
        return Mask.parse(mask)
    if is_a(mask, Mask):
        mask.check_disjoint()
        return mask
    if callable(mask):
        raise MaskError(
            f"mask is {described(mask)} and not what it returns; call it, as in mask=rs.causal()"
        )
    hint = (
        "a matrix of pairs cannot be split over ranks; "
        if getattr(mask, "ndim", 0)
        else ""
    )
    raise MaskError(
        f"mask must be a mask, its text or None, got {described(mask)}; {hint}{FORMS}"
    )


def find_layouts(
    layout: LayoutName | Layout,
    key_layout: Layout | None,
    ranks: int,
    tokens: int,
    key_tokens: int,
    remedy: str,
) -> tuple[Layout, Layout]:
    """Return the layouts of queries and keys, checked; ``remedy`` pads tensors."""
    _check_layouts(layout, key_layout)
    if isinstance(layout, str):
        layout = Layout(layout, ranks * tokens, ranks)
        if key_layout is None and key_tokens != tokens:
            key_layout = Layout(layout.name, ranks * key_tokens, ranks)
    key_layout = key_layout or layout
    if key_layout.name != layout.name:
        raise LayoutError(
            f"the keys' layout is {key_layout.name}, that of the queries {layout.name}; make them equal"
        )
    for what, one, held in (
        ("queries", layout, tokens),
        ("keys", key_layout, key_tokens),
    ):
        if one.ranks != ranks:
            raise LayoutError(
                f"the layout of the {what} is for {one.ranks} ranks, the ring has {ranks}; use {ranks}"
            )
        if one.tokens_per_rank != held:
            hint = (
                "; zigzag needs an even number of local tokens"
                if one.name == "zigzag" and held % 2
                else ""
            )
            raise LayoutError(
                f"{what}: {held} local tokens, but {one.name} over {ranks} ranks for {one.length} tokens "
                f"holds {one.tokens_per_rank} per rank{hint}; pad with {remedy}"
            )
    return layout, key_layout


def _check_layouts(layout: object, key_layout: object) -> None:
    if not isinstance(layout, (str, Layout)):
        raise LayoutError(
            f"layout must be a name or a Layout, got {described(layout)}; {_LAYOUT_HINT}"
        )
    if key_layout is not None and not isinstance(key_layout, Layout):
        raise LayoutError(
            f"key_layout must be a Layout or None, got {described(key_layout)}; {_LAYOUT_HINT}"
        )
    for one in (layout, key_layout):
        if isinstance(one, Layout) and one.members > 1:
            raise LayoutError(
                f"a layout of groups ({one.members} members) is for routes; {_LAYOUT_HINT}"
            )


def check_sharding(shape: Sequence[int], layout: object, dim: object) -> None:
    """Raise LayoutError unless a layout holds all positions and ``dim`` exists."""
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"layout must be a Layout, got {described(layout)}; {_LAYOUT_HINT}"
        )
    if isinstance(layout, CustomLayout):
        _check_whole(layout)
    if not -len(shape) <= integer(dim, "dim", LayoutError) < len(shape):
        raise LayoutError(
            f"dimension {dim} is none of a tensor of shape {tuple(shape)}; give 0 to {len(shape) - 1}"
        )


def _check_whole(layout: CustomLayout) -> None:
    end = max(
        [
            layout.length,
            *(span.start + span.count for held in layout.parts for span in held),
        ]
    )
    if layout.padded_length != end:
        raise LayoutError(
            f"a custom layout must hold every position to be sharded, this one holds {layout.padded_length} of {end}"
        )
