"""A dict for what is asked for again and again, of bounded size."""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(dict[K, V], Generic[K, V]):
    """A dict that forgets its oldest entry when it gets more than ``most``."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.pop(next(iter(self)), None)
