"""Record of written rows, so that accumulators need no zeroing: first values are written, not added."""

import numpy as np

from ringspan.core.geometry.ranges import Ranges


class WrittenRows:
    def __init__(self, count: int) -> None:
        self._missing = count
        self._written = np.zeros(count, dtype=np.bool_)

    def touch(self, rows: slice) -> int:
        """Return the number of unwritten rows; if not all of them, ``fill`` before adding."""
        if not self._missing:
            return 0
        count = rows.stop - rows.start
        missing = count - int(np.count_nonzero(self._written[rows]))
        if missing == count:
            self._written[rows] = True
            self._missing -= count
        return missing

    def fill(self) -> Ranges:
        """Return all unwritten ranges, for neutral numbers, and mark them written."""
        missing, self._missing = self._missing, 0
        if missing in (0, self._written.size):  # without a search, which takes longer than to start a kernel
            return ((0, missing),) if missing else ()
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self._written, [True]))))
        return tuple((int(first), int(last)) for first, last in edges.reshape(-1, 2))
