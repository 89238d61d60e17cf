"""Messages between ranks are named in the terms of the field; the metaphors of earlier versions do not come back."""

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
# As words and as parts of identifiers: `_MAILBOX`, `next_parcel`, `OldMailbox` (taken apart before the search).
DROPPED = re.compile(
    r"(?<![a-z])(?:mail(?: ?box(?:es)?)?|letters?|parcels?|freights?|manieth|passages?|journeys?|wires?)(?![a-z])"
)
# By file, the parts of lines in which a word has its ordinary use, or is what a file on disk says.
ALLOWED = {
    "ringspan/plan/cluster/hardware.py": ("letters and digits",),
    "ringspan/cli/plan_tables.py": ("with its letters and units",),
    "ringspan/jax/kernels/pallas.py": ("has a letter for each array",),
    # The keys of a profile that is written as JSON.
    "ringspan/measure/trace/profile.py": ("``passages``", "passages: list[dict", "self.passages", "passages=["),
    "ringspan/report/profile_page.py": ("profile.passages",),
}


def dropped_words(text: str) -> list[str]:
    """Those that occur in a text, in lower case."""
    return DROPPED.findall(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())


def test_metaphors_for_messages_do_not_occur():
    found: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        name, text = file.relative_to(SOURCE).as_posix(), file.read_text()
        for ordinary in ALLOWED.get(name, ()):
            assert ordinary in text, f"{name} no longer has {ordinary!r}: take it off the list"
            text = text.replace(ordinary, "")
        if words := dropped_words(text):
            found[name] = words
    assert not found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("self._mailboxes", ["mailboxes"]),
        ("_LETTERS: Final = 255", ["letters"]),
        ("class NextParcel(NamedTuple):", ["parcel"]),
        ("the how manieth message", ["manieth"]),
        ("mail.expect(sender)", ["mail"]),
        ("a passage, a journey of freight", ["passage", "journey", "freight"]),
        ("gradient_wire", ["wire"]),
        ("class SharedMailBox:", ["mail box"]),
        ("newsletter, passenger, e-mailed", []),
    ],
)
def test_words_are_found_in_prose_and_in_identifiers(text, words):
    assert dropped_words(text) == words
