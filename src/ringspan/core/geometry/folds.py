"""Folds: parts of a sequence that all ranks of a ring compute one after the other, each split over the ring.

S global tokens, N ranks, F tokens of a fold on all ranks.
"""

from functools import lru_cache

import numpy as np

from ringspan.core.errors import LayoutError
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.geometry.pairs import bound
from ringspan.core.messages.numbers import check_whole
from ringspan.core.names import BatchLayoutName, LayoutName


def check_folds(name: BatchLayoutName, folds: int) -> LayoutName:
    """Return the layout within each fold; raise for a layout or number of folds that no sequence can have.

    Raises:
        LayoutError: a layout whose parts of a fold are not a few runs of tokens.
        ConfigError: a number of folds below one.
    """
    check_whole("folds", folds)
    if name not in ("zigzag", "contiguous"):
        raise LayoutError(
            f"layout {name!r} is not split into folds; use zigzag or contiguous, or folds=1"
        )
    return name


def check_full_folds(
    name: BatchLayoutName, length: int, ranks: int, folds: int
) -> None:
    """Raise LayoutError if some of several folds of a sequence would hold only padding."""
    if folds == 1:
        return
    chunks = Layout(check_folds(name, folds), 1, ranks).padded_length
    most = -(-length // chunks)
    if folds > most:
        raise LayoutError(
            f"folds={folds}: a fold has {chunks} chunks ({name}, a ring of {ranks}), and {length} tokens fill {most} "
            f"folds with one token in each; use at most {most}"
        )


@lru_cache(maxsize=64)
def fold_layouts(
    name: BatchLayoutName, length: int, ranks: int, folds: int
) -> tuple[CustomLayout, ...]:
    """Return the layout of each fold: consecutive tokens of a sequence, so that a fold sees itself and earlier ones.

    Within a fold ranks have equal work, of the layout ``name``. Folds are of one size, the end is padding.

    Raises:
        LayoutError, ConfigError: as ``check_folds``.
    """
    layout = check_folds(name, folds)
    tokens = Layout(layout, -(-length // folds), ranks).padded_length
    within = [Layout(layout, tokens, ranks).spans(rank) for rank in range(ranks)]
    starts = range(0, folds * tokens, tokens)
    return tuple(
        CustomLayout.of(
            ([(start + span.start, span.count) for span in spans] for spans in within),
            length,
        )
        for start in starts
    )


@lru_cache(maxsize=64)
def folded_layout(
    name: BatchLayoutName, length: int, ranks: int, folds: int
) -> CustomLayout:
    """Return the layout of a whole sequence in folds: each rank holds its parts of them, in order."""
    layouts = fold_layouts(name, length, ranks, folds)
    return CustomLayout.of(
        (
            [(span.start, span.count) for fold in layouts for span in fold.spans(rank)]
            for rank in range(ranks)
        ),
        length,
    )


@lru_cache(maxsize=1024)
def folds_read(mask: str, length: int, tokens: int, fold: int) -> tuple[int, ...]:
    """Return the earlier folds that a fold's queries see, last first.

    Args:
        mask: ``Mask.spec`` of the whole sequence.
        length: its tokens, with padding.
        tokens: tokens of a fold, on all ranks.
        fold: whose queries.
    """
    regions = Mask.parse(mask).table(length, length).copy()
    regions[:, 0] = np.maximum(regions[:, 0], fold * tokens)
    regions[:, 1] = np.minimum(regions[:, 1], (fold + 1) * tokens)
    regions = bound(regions)
    firsts, lasts = regions[:, 2] // tokens, (regions[:, 3] - 1) // tokens
    return tuple(
        each
        for each in reversed(range(fold))
        if bool(((firsts <= each) & (each <= lasts)).any())
    )


@lru_cache(maxsize=1024)
def last_reader(mask: str, length: int, tokens: int, fold: int) -> int:
    """Return the last fold whose queries see a fold's keys, -1 if there is none; arguments like ``folds_read``."""
    regions = Mask.parse(mask).table(length, length).copy()
    regions[:, 2] = np.maximum(regions[:, 2], fold * tokens)
    regions[:, 3] = np.minimum(regions[:, 3], (fold + 1) * tokens)
    return max(((int(last) - 1) // tokens for last in bound(regions)[:, 1]), default=-1)
