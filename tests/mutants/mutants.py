"""Planted bugs: what is changed in which file, and the test of `make test` that must notice.

`bugs.txt` has them by invariant of tests/README.md (`# ...`) and by test (as pytest names it, below tests): a line
`  name: file below src/ringspan`, lines `  -` of the code and lines `  +` of what stands there instead. The code must
occur exactly once, on however many lines, so that no bug goes stale in silence. Each is silent: numbers are wrong and
nothing raises, or would not if a check were gone.
"""

import os
import re
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple


class Mutant(NamedTuple):
    invariant: str
    test: str
    name: str
    file: str
    old: str
    new: str

    def places(self, source: str) -> list[re.Match[str]]:
        """Where the code that it changes is in the text of a file, folded as that is."""
        tokens = re.findall(r"\w+|\S", self.old)
        pattern = re.escape(tokens[0])
        for before, token in pairwise(tokens):
            is_in_words = f"{before[-1]}{token[0]}".isalnum()
            pattern += r"\s+" if is_in_words else r"\s*"
            pattern += r",?\s*" if token in ")]}" and before != "," else ""
            pattern += re.escape(token)
        return list(re.finditer(pattern, source))

    def change(self, source: str) -> str:
        places = self.places(source)
        assert len(places) == 1, (
            f"{self.name}: the code it changes occurs {len(places)} times in {self.file}"
        )
        # The code begins where its first word does, and so does what stands there instead.
        place, indent = places[0], len(self.old) - len(self.old.lstrip())
        return source[: place.start()] + self.new[indent:] + source[place.end() :]


BUGS: Final = Path(__file__).with_name("bugs.txt").read_text()
_BUG: Final = re.compile(
    r"^  (\w.*): (\S+\.py)\n((?:  -.*\n)+)((?:  \+.*\n)*)", re.MULTILINE
)


def _parts(text: str, heading: str) -> Iterator[tuple[str, str]]:
    """Yield what a heading says, and the text below it."""
    _, *found = re.split(heading, text, flags=re.MULTILINE)
    return zip(found[::2], found[1::2], strict=True)


def _code(lines: str) -> str:
    return "\n".join(line[3:] for line in lines.splitlines())


MUTANTS: Final = [
    Mutant(invariant, test, name, file, _code(old), _code(new))
    for invariant, tests in _parts(BUGS, r"^# (.+)\n")
    for test, bugs in _parts(tests, r"^(\w.+)\n")
    for name, file, old, new in _BUG.findall(bugs)
]


def chosen() -> list[Mutant]:
    """Return all mutants, or, with RINGSPAN_SAMPLE=12, the next twelve each day, spread over the list."""
    count = int(os.environ.get("RINGSPAN_SAMPLE") or len(MUTANTS))
    stride = max(1, len(MUTANTS) // count)
    first = int(os.environ.get("RINGSPAN_DAY") or date.today().toordinal())
    return [
        MUTANTS[(first + index * stride) % len(MUTANTS)]
        for index in range(min(count, len(MUTANTS)))
    ]
