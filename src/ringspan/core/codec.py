"""Encodings of keys and values for sending, in bytes; ``ringspan.torch.engine.attention.encoding`` has their code."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from ringspan.core.errors import UnsupportedError
from ringspan.core.names import (
    COMM_DTYPE_NAMES,
    GRADIENT_COMM_DTYPE_NAMES,
    CommDtypeName,
    GradientCommDtypeName,
    find_name,
)


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

    @property
    def option(self) -> str:
        """The option that asks for it, as messages name it."""
        return f"comm_dtype={self.name!r}"

    @property
    def as_argument(self) -> dict[str, str]:
        """The option as a keyword's name and value."""
        return {"comm_dtype": self.name}

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


class Sent(NamedTuple):
    """Encodings of one attention's tensors in messages: an operator's ``comm_dtype`` and ``gradient_comm_dtype``."""

    keys: CommDtypeName = "exact"
    """Encoding of keys and values."""
    gradients: GradientCommDtypeName = "exact"
    """Encoding of dk and dv; exact is float32."""

    @property
    def text(self) -> str:
        """The names as one word, which ``parse`` reads."""
        return f"{self.keys},{self.gradients}"

    @staticmethod
    def parse(text: str) -> "Sent":
        return Sent(*text.split(","))  # pyright: ignore[reportArgumentType]

    @property
    def codec(self) -> Codec:
        """The encoding of keys and values; UnsupportedError for an unknown one."""
        return codec(self.keys)

    @property
    def rounds_gradients(self) -> bool:
        """True if dk and dv are sent as bfloat16."""
        return self.gradients == "bfloat16"

    def checked(self) -> Codec:
        """Return ``codec``; UnsupportedError for any name that no encoding has."""
        sent = self.codec
        find_name(
            "gradient_comm_dtype",
            self.gradients,
            GRADIENT_COMM_DTYPE_NAMES,
            UnsupportedError,
        )
        return sent


UNCHANGED: Final = Sent()
