"""The definition of a task: a prompt of so many units, and the scoring of an answer."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

_MORE_TOKENS: Final = 8


@dataclass(frozen=True)
class Prompt:
    text: str
    """The user's text."""
    cue: str
    """The beginning of the answer, which the model continues."""
    answers: tuple[str, ...]
    """All that an answer should name."""


@dataclass(frozen=True)
class Material:
    """The material of prompts besides words."""

    sentences: Sequence[str] = ()
    """Sentences of a real text, in order."""
    needles: int = 1
    """Values to be found."""
    distractors: int = 0
    """Needles of the same form that are not asked for."""

    def excerpt(self, random: Random, size: int) -> list[str]:
        """Take so many consecutive sentences from a random place, wrapping around at the end."""
        start, count = random.randrange(len(self.sentences)), len(self.sentences)
        return [self.sentences[(start + at) % count] for at in range(size)]


def found(said: str, answers: Sequence[str]) -> float:
    """Compute the share of answers that occur in the text as whole words, ignoring case.

    RULER's ``string_match_all``, which also counts an answer inside a longer word.
    """
    hits = [re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", said, re.IGNORECASE) for answer in answers]
    return sum(hit is not None for hit in hits) / len(answers)


def first_number(said: str, answers: Sequence[str]) -> float:
    """Return 1 if the first number in the text is the answer, as LongEval counts."""
    number = re.search(r"\d+", said)
    return float(number is not None and number[0] == answers[0])


Builder = Callable[[Random, int, float, Material], Prompt]


@dataclass(frozen=True)
class Task:
    """A kind of question. To add one, write a file with its builder and list it in ``tasks/__init__.py``."""

    name: str
    about: str
    """One sentence, for ``--help`` and the page."""
    build: Builder
    """Pure function of random numbers, units of length, the depth (0 beginning, 1 end) and material."""
    score: Callable[[str, Sequence[str]], float] = found
    smallest: int = 1
    """Units of the shortest prompt."""
    needs_text: bool = False
    has_depth: bool = False
    """True if accuracy is reported by the depth of the answer."""
    needles: int | None = None
    """Default number of values to be found; None if that is no option."""


def new_tokens(answer_tokens: int) -> int:
    """Compute the tokens for an answer of so many: room for words between those that count."""
    return 2 * answer_tokens + _MORE_TOKENS
