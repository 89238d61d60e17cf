"""What a task is: a prompt of so many units, and how an answer is scored."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

_MORE_TOKENS: Final = 8


@dataclass(frozen=True)
class Prompt:
    """One question over a long text."""

    text: str
    """What the user says."""
    cue: str
    """How the answer begins; the model continues it."""
    answers: tuple[str, ...]
    """All that an answer should name."""


@dataclass(frozen=True)
class Material:
    """What prompts are made from besides words."""

    sentences: Sequence[str] = ()
    """Of a real text, in order."""
    needles: int = 1
    """Values to be found."""
    distractors: int = 0
    """Needles of the same form that are not asked for."""

    def excerpt(self, random: Random, size: int) -> list[str]:
        """So many sentences in their order, from anywhere; the text begins anew at its end."""
        start, count = random.randrange(len(self.sentences)), len(self.sentences)
        return [self.sentences[(start + at) % count] for at in range(size)]


def found(said: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur in what was said, as whole words, in upper or lower case.

    RULER's ``string_match_all``, which also counts an answer inside of a longer word.
    """
    hits = [re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", said, re.IGNORECASE) for answer in answers]
    return sum(hit is not None for hit in hits) / len(answers)


def first_number(said: str, answers: Sequence[str]) -> float:
    """1 where the first number that was said is the answer, as LongEval counts."""
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
    """From random numbers, units of length, the depth (0 beginning, 1 end) and material; pure."""
    score: Callable[[str, Sequence[str]], float] = found
    smallest: int = 1
    """Units of the shortest prompt."""
    needs_text: bool = False
    has_depth: bool = False
    """Whether accuracy is told by the depth of what is asked for."""
    needles: int | None = None
    """Values to be found unless the user says otherwise; None where that is no option."""


def new_tokens(answer_tokens: int) -> int:
    """Tokens to write for an answer of so many: room for words between those that count."""
    return 2 * answer_tokens + _MORE_TOKENS
