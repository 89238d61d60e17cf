"""Which rows of an accumulator hold something yet: what comes first is written, so that nothing need be zeroed."""

import numpy as np

from ringspan.core.geometry.ranges import Ranges


class WrittenRows:
    """Rows of an uninitialised tensor, none of them written yet."""

    def __init__(self, count: int) -> None:
        self._written = np.zeros(count, dtype=np.bool_)

    def touch(self, start: int, stop: int) -> int:
        """How many of the rows [start, stop) were not written before; if not all of them, ``fill`` before adding."""
        before = int(np.count_nonzero(self._written[start:stop]))
        if before in (0, stop - start):
            self._written[start:stop] = True
        return stop - start - before

    def fill(self, start: int = 0, stop: int | None = None) -> Ranges:
        """The ranges of rows, within [start, stop), that are still to be written with neutral numbers, and now count as
        written.
        """
        written = self._written[start:stop]
        if written.all():
            return ()
        edges = np.flatnonzero(np.diff(np.concatenate(([True], written, [True])))) + start
        written[:] = True
        return tuple((int(first), int(last)) for first, last in edges.reshape(-1, 2))
