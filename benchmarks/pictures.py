"""The pictures of README.md and of docs/understand, drawn from schedules: ``python -m benchmarks.pictures``.

A test draws them again and compares.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.ancestor_curves import ancestor_curves
from benchmarks.moving_picture import moving_picture
from benchmarks.understand_pictures import (
    cache_picture,
    overlap_picture,
    partials_picture,
    states_picture,
    ulysses_picture,
)
from ringspan.core.geometry.balanced import balanced
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import (
    causal,
    documents,
    full,
    prefix_lm,
    sliding_window,
)
from ringspan.core.geometry.tree import tree
from ringspan.report.drawing import svg
from ringspan.report.ring_pictures import ring_picture, travel_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS: Final = Path(__file__).parents[1] / "docs"
_LENGTH: Final = 8192
_PACKED: Final = documents([600, 4800, 1100, 1300, 392])
_ANSWERS: Final = tree([4096, 1200, 500, 896, 700, 800], [-1, 0, 0, 0, 0, 0])
_ZIGZAG: Final = Layout("zigzag", _LENGTH, 4)


def _ancestors() -> "Figure":
    found = json.loads(
        (DOCS.parent / "benchmarks" / "results" / "ancestors-cpu.json").read_text(
            encoding="utf-8"
        )
    )
    return ancestor_curves(found["rows"])


PICTURES: Final[dict[str, Callable[[], "Figure | str"]]] = {
    "ring-moving.svg": lambda: moving_picture(Layout("zigzag", 24, 4), causal()),
    "ring.svg": lambda: ring_picture(_ZIGZAG, causal()),
    "shared-prefixes.svg": lambda: ring_picture(
        balanced(_ANSWERS, length=_LENGTH, ranks=4),
        _ANSWERS,
        "one prompt, five answers, balanced layout",
    ),
    "understand/ancestors.svg": _ancestors,
    "understand/blocks.svg": lambda: ring_picture(
        Layout("contiguous", _LENGTH, 4), full()
    ),
    "understand/overlap.svg": overlap_picture,
    "understand/partials.svg": partials_picture,
    "understand/ulysses.svg": ulysses_picture,
    "understand/cache.svg": cache_picture,
    "understand/states.svg": states_picture,
    "understand/travel.svg": lambda: travel_picture(_ZIGZAG, causal()),
    "understand/layout-contiguous.svg": lambda: ring_picture(
        Layout("contiguous", _LENGTH, 4), causal()
    ),
    "understand/layout-striped.svg": lambda: ring_picture(
        Layout("striped", 32, 4), causal()
    ),
    "understand/documents-zigzag.svg": lambda: ring_picture(
        _ZIGZAG, _PACKED, "five documents, zigzag layout"
    ),
    "understand/documents-balanced.svg": lambda: ring_picture(
        balanced(_PACKED, length=_LENGTH, ranks=4),
        _PACKED,
        "five documents, balanced layout",
    ),
    "understand/mask-window.svg": lambda: ring_picture(
        Layout("contiguous", _LENGTH, 4), sliding_window(1536)
    ),
    "understand/mask-prefix.svg": lambda: ring_picture(_ZIGZAG, prefix_lm(2560)),
    "understand/mask-both.svg": lambda: ring_picture(
        Layout("contiguous", _LENGTH, 4),
        documents([3400, 4792]) & (sliding_window(1024) | prefix_lm(512)),
        "documents & (window | prefix), contiguous layout",
    ),
}


def drawn(name: str) -> str:
    """The text of a picture's file."""
    picture = PICTURES[name]()
    return (picture if isinstance(picture, str) else svg(picture)) + "\n"


if __name__ == "__main__":
    for name in PICTURES:
        (DOCS / name).write_text(drawn(name), encoding="utf-8")
