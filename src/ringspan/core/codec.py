"""Encodings of keys and values for sending, in bytes; ``ringspan.torch.engine.attention.encoding`` has their code."""

from dataclasses import dataclass
from typing import Final

from ringspan.core.errors import UnsupportedError
from ringspan.core.names import COMM_DTYPE_NAMES, CommDtypeName, find_name


@dataclass(frozen=True)
class Codec:
    """An encoding: ``itemsize`` bytes for each number, or None if it is sent in the dtype that it is computed in.

    A ``is_scaled`` one sends a float32 factor in addition, for the keys and for the values of each head.
    """

    name: CommDtypeName
    itemsize: int | None = None
    is_scaled: bool = False

    @property
    def is_exact(self) -> bool:
        return self.itemsize is None

    def sent_itemsize(self, itemsize: int) -> int:
        """Return the bytes of a sent number that is computed in ``itemsize``, without the few factors."""
        return self.itemsize or itemsize

    def converts(self, itemsize: int) -> bool:
        """Return whether numbers of ``itemsize`` bytes are copied into another form before they are sent."""
        return self.is_scaled or self.itemsize not in (None, itemsize)


EXACT: Final = Codec("exact")
_CODECS: Final = {
    "exact": EXACT,
    "bfloat16": Codec("bfloat16", itemsize=2),
    "float8": Codec("float8", itemsize=1, is_scaled=True),
    "int8": Codec("int8", itemsize=1, is_scaled=True),
}


def codec(comm_dtype: str) -> Codec:
    """Return the encoding of a ``comm_dtype``; UnsupportedError for an unknown one."""
    name = find_name("comm_dtype", comm_dtype, COMM_DTYPE_NAMES, UnsupportedError)
    return _CODECS[name]
