"""Rows with equal beginnings as a tree of segments."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ringspan.core.geometry.tree import Tree


class Shared(NamedTuple):
    """Rows as the branches of a tree."""

    tree: Tree
    tokens: np.ndarray
    """The segments, one after the other."""
    places: list[np.ndarray]
    """Places of each row's tokens in ``tokens``."""


def shared_prefixes(rows: Sequence[np.ndarray], least: int) -> Shared:
    """Store the shared beginnings of rows of tokens once, if that saves ``least`` tokens or more of a row.

    Every row ends in a segment of its own, of a token at least: equal rows differ in their last segment. Segments are
    stored depth first.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">i8").tobytes())
    common = [_common(rows[a], rows[b]) for a, b in pairwise(order)]
    lengths: list[int] = []
    parents: list[int] = []
    parts: list[np.ndarray] = []
    before: list[np.ndarray] = []  # places of each segment's branch
    places = [np.zeros(0, np.int64)] * len(rows)
    todo = [(0, len(order), -1)]  # rows of the order, and the segment that they continue
    while todo:
        first, stop, parent = todo.pop()
        row = rows[order[first]]
        shared = min(common[first : stop - 1], default=len(row))
        branch = before[parent] if parent >= 0 else np.zeros(0, np.int64)
        start = len(branch)
        if stop - first == 1 or shared - start >= least:
            place = sum(lengths)
            before.append(np.concatenate((branch, np.arange(place, place + shared - start))))
            lengths.append(shared - start)
            parents.append(parent)
            parts.append(row[start:shared])
            parent = len(lengths) - 1
        if stop - first == 1:
            places[order[first]] = before[parent]
        else:
            cuts = [number + 1 for number in range(first, stop - 1) if common[number] == shared]
            todo += [(*ends, parent) for ends in reversed([*pairwise((first, *cuts, stop))])]
    return Shared(Tree(tuple(lengths), tuple(parents)), np.concatenate(parts), places)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of two rows' shared beginning, without the last token of each."""
    length = min(len(one), len(other)) - 1
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
