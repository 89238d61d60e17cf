"""Words of the source: messages between ranks in the terms of the field, docstrings without habits of translation."""

import ast
import re
from collections.abc import Iterator
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
    "ringspan/cli/tables/plan.py": ("with its letters and units",),
    "ringspan/jax/kernels/pallas.py": ("has a letter for each array",),
    # The keys of a profile that is written as JSON.
    "ringspan/measure/trace/profile.py": ("``passages``", "passages: list[dict", "self.passages", "passages=["),
    "ringspan/report/profile_page.py": ("profile.passages",),
}

# Habits of docstrings: a pattern, its count in src and what to write. A count may fall, and never rise again.
HABITS = {
    r"\A(What|Whether|Which|Who|How|Where|Why|Of|As|By|For|Those|That|While|Until)\b": (0, "a verb or a noun first"),
    r"\b[Nn]one where\b(?!\()": (0, "None if"),
    r"\b(of|in|by|from|to|for|with|on|beside|behind) (which|whom|whose)\b": (36, "two sentences"),
    r"\b[Nn]one (when|for|of|is)\b": (26, "None if, or no X"),
    r"\bwhere (there|it|they|that|the|a|one|no|nothing)\b": (21, "if, when"),
    r"\b(that|those) of\b": (29, "the noun again"),
    r"\b(is|are|was) no (?!longer)[a-z]": (8, "is not a"),
    r"(?<!``)\bbehind\b": (2, "after"),
    r"\b[Bb]eside\b": (20, "next to, in addition to, except"),
    r"\balike\b(?!:)": (4, "equally, the same"),
    r"\banew\b": (5, "again"),
    r"\b\w+ alone\b": (18, "only"),
    r"\b(nobody|somebody|anybody|whoever|whom)\b": (2, "no rank, another process"),
    r"\b(so|as) many\b": (21, "N, the number"),
    r"\bma(k|d)es? of\b": (6, "the result of"),
    r"\bgo(es)? on\b": (3, "continue"),
}
LONG_NAMES = 229  # tests whose names have more than 60 characters


def names_and_docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield getattr(node, "name", ""), " ".join((ast.get_docstring(node) or "").split())


def check_ceiling(count: int, ceiling: int, what: str) -> None:
    assert count <= ceiling, f"{what}: {count}, at most {ceiling}"
    assert count >= ceiling - 3, f"{what}: {count}; lower the ceiling of {ceiling}"


def test_habits_of_translation_only_become_fewer():
    docstrings = [docstring for _, docstring in names_and_docstrings(SOURCE)]
    for pattern, (ceiling, remedy) in HABITS.items():
        count = sum(len(re.findall(pattern, docstring)) for docstring in docstrings)
        check_ceiling(count, ceiling, f"{pattern!r} (write: {remedy})")


def test_names_of_tests_only_become_shorter():
    names = [name for name, _ in names_and_docstrings(Path(__file__).parent) if name.startswith("test_")]
    check_ceiling(sum(len(name) > 60 for name in names), LONG_NAMES, "test names of more than 60 characters")


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
