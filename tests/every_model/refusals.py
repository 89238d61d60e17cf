"""What docs/models.md says of the types that raise."""

import tomllib
from pathlib import Path
from typing import Final, NamedTuple


class Refusal(NamedTuple):
    """A reason as the page has it: why, in words for who reads it, and what it would take."""

    why: str
    needed: str


REFUSALS: Final = {
    piece: Refusal(**words)
    for piece, words in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}


def refusal_of(message: str) -> Refusal:
    """What the page says for an error.

    Raises:
        LookupError: nothing; the page must not have a message for programmers.
    """
    found = next(
        (refusal for piece, refusal in REFUSALS.items() if piece in message), None
    )
    if found is None:
        raise LookupError(f"docs/models.md has no words for: {message}")
    return found
