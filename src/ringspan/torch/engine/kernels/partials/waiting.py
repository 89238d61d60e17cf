"""Values that wait for others of the same rows, so that their sum or merge is written once."""

from collections.abc import Iterator

from torch import Tensor

from ringspan.core.schedule.merging import is_full, segments


class Waiting:
    """Values of rows of a result, each a few tensors (B, heads, rows, ...)."""

    def __init__(self, rows: int) -> None:
        self.everything = slice(0, rows)
        self._ends: list[tuple[int, int]] = []
        self._values: list[tuple[Tensor, ...]] = []
        self._count = 0  # rows that wait

    def add(self, rows: slice, *values: Tensor) -> bool:
        """Let the values of some rows wait; return True if too many wait now."""
        self._ends.append((rows.start, rows.stop))
        self._values.append(values)
        self._count += rows.stop - rows.start
        return is_full(self._count, self.everything.stop)

    def of(self, rows: slice) -> Iterator[tuple[slice, list[tuple[Tensor, ...]]]]:
        """Yield parts of some rows, each with the values that cover it."""
        for start, stop, numbers in segments(tuple(self._ends), self.everything.stop):
            first, last = max(start, rows.start), min(stop, rows.stop)
            if first < last:
                cuts = [
                    (
                        slice(first - self._ends[n][0], last - self._ends[n][0]),
                        self._values[n],
                    )
                    for n in numbers
                ]
                yield (
                    slice(first, last),
                    [tuple(x[:, :, within] for x in values) for within, values in cuts],
                )

    def clear(self) -> None:
        self._ends.clear()
        self._values.clear()
        self._count = 0
