"""Names of the mechanisms that add to plain attention, and the pairs of them that do not go together."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from ringspan.core.errors import UnsupportedError

CHOSEN_KEYS: Final = "chosen keys"
STATES: Final = "states"
MEDIA: Final = "media"
FOLDS: Final = "folds"
TREES: Final = "trees"
ROUTES: Final = "routes"
NAMES: Final = (CHOSEN_KEYS, STATES, MEDIA, FOLDS, TREES, ROUTES)


class Conflict(NamedTuple):
    """The reason why two mechanisms do not go together, and a remedy that leaves one out."""

    reason: str
    remedy: str


_NO_FOLDS: Final = "use folds=1"
_NO_TREE: Final = "give it separate rows"

# Every pair that is not named here goes together.
CONFLICTS: Final[Mapping[frozenset[str], Conflict]] = {
    frozenset((FOLDS, CHOSEN_KEYS)): Conflict(
        "an index chooses among all keys, and a fold's exist one after the other",
        _NO_FOLDS,
    ),
    frozenset((FOLDS, MEDIA)): Conflict(
        "images and sound are placed in whole sequences", _NO_FOLDS
    ),
    frozenset((FOLDS, TREES)): Conflict(
        "a tree's branches are placed in whole sequences", _NO_FOLDS
    ),
    frozenset((TREES, CHOSEN_KEYS)): Conflict(
        "an index numbers the keys of a row, whichever branch they are in", _NO_TREE
    ),
    frozenset((TREES, MEDIA)): Conflict(
        "images and sound belong to rows of their own", _NO_TREE
    ),
    frozenset((TREES, ROUTES)): Conflict(
        "a shared token has one route, and its rows may have several", _NO_TREE
    ),
}


def refuse_pairs(found: Mapping[str, str], whose: str, remedy: str = "") -> None:
    """Raise UnsupportedError if two mechanisms that were found do not go together.

    ``found`` describes each by its name, for the error: ``{FOLDS: "folds=2"}``; ``whose`` is the model or batch;
    ``remedy`` takes the place of the pair's own.
    """
    for pair, (reason, usual) in CONFLICTS.items():
        one, other = (name for name in NAMES if name in pair)
        if found.get(one) and found.get(other):
            raise UnsupportedError(
                f"{whose}: {found[other]} does not go with {found[one]}, since {reason}; {remedy or usual}"
            )
