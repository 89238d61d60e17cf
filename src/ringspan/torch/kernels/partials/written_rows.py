"""Record of written rows, so that accumulators need no zeroing: first values are written, not added."""

import numpy as np

from ringspan.core.geometry.ranges import Ranges


class WrittenRows:
    """Rows of an uninitialised tensor, none of them written yet."""

    def __init__(self, count: int) -> None:
        self._written = np.zeros(count, dtype=np.bool_)

    def touch(self, start: int, stop: int) -> int:
        """Return the number of unwritten rows in [start, stop); if not all of them, ``fill`` before adding."""
        before = int(np.count_nonzero(self._written[start:stop]))
        if before in (0, stop - start):
            self._written[start:stop] = True
        return stop - start - before

    def fill(self, start: int = 0, stop: int | None = None) -> Ranges:
        """Return the unwritten ranges within [start, stop), for neutral numbers, and mark them written."""
        written = self._written[start:stop]
        if written.all():
            return ()
        edges = np.flatnonzero(np.diff(np.concatenate(([True], written, [True])))) + start
        written[:] = True
        return tuple((int(first), int(last)) for first, last in edges.reshape(-1, 2))
