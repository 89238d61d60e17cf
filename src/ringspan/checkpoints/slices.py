"""Experts that a checkpoint holds in other slices than a model does, or whole: ``expert_slices`` changed between runs.

saved in 2 slices of 5 experts     0 0 0 | 1 1
loaded in 3                        0 0 | 1 1 | 2       its slice 1: the last row of 0 and the first of 1
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ringspan.torch.model.weights.shards import SLICES, whole_name

_NUMBER: Final = re.compile(rf"\.{SLICES}\.(\d+)\.")


@dataclass(frozen=True)
class SavedRows:
    """Rows of a saved tensor that are rows of a wanted one."""

    name: str
    first: int  # there
    place: int  # in the wanted tensor
    count: int


class _Slice(NamedTuple):
    name: str
    start: int  # in the whole tensor
    stop: int
    row: tuple[int, ...]  # shape of one row


def moved_rows(
    saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, list[SavedRows]]:
    """Return, by their names and shapes, the rows of each wanted tensor that were saved in other slices."""
    there, here = _slices_in(saved), _slices_in(wanted)
    found: dict[str, list[SavedRows]] = {}
    for whole, slices in here.items():
        others = there.get(whole, [])
        if not others or others == slices:
            continue
        # Another tensor is not moved, but refused by its reader.
        mine, theirs = slices[-1], others[-1]
        if (theirs.stop, theirs.row) != (mine.stop, mine.row):
            continue
        for each in slices:
            found[each.name] = [*_overlaps(each, others)]
    return found


def _overlaps(wanted: _Slice, saved: list[_Slice]) -> Iterator[SavedRows]:
    for each in saved:
        start = max(wanted.start, each.start)
        count = min(wanted.stop, each.stop) - start
        if count > 0:
            yield SavedRows(each.name, start - each.start, start - wanted.start, count)


def _slices_in(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[_Slice]]:
    """Return the slices of each tensor by its whole name, in order. Numbers, such as steps, are one row of all."""
    named: dict[str, list[str]] = {}
    for name in shapes:
        named.setdefault(whole_name(name), []).append(name)
    found: dict[str, list[_Slice]] = {}
    for whole, names in named.items():
        start = 0
        for name in sorted(names, key=_number_of):
            shape = shapes[name]
            begin = start if shape else 0
            start = begin + (shape[0] if shape else 1)
            found.setdefault(whole, []).append(_Slice(name, begin, start, shape[1:]))
    return found


def _number_of(name: str) -> int:
    match = _NUMBER.search(name)
    return int(match[1]) if match else 0
