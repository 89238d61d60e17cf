"""Questions to a model: each a prompt of units of length, and the scoring of an answer.

``lines`` is line retrieval as in LongEval (Li et al. 2023) and figure 3 of the Ring Attention paper; the others are
RULER's (Hsieh et al. 2024): needles in real text, variables to be traced, words to be counted.
"""

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Final

from ringspan.core.errors import ConfigError

ADJECTIVES, NOUNS = (
    tuple(part.split())
    for part in Path(__file__)
    .with_name("names.txt")
    .read_text(encoding="utf-8")
    .split("\n\n")
)


def names(random: Random, count: int) -> list[str]:
    """Return different names like ``brave-otter``, of three words if two are too few, or raise ConfigError."""
    adjectives, nouns = len(ADJECTIVES), len(NOUNS)
    pairs = adjectives * nouns
    if count <= pairs:
        return [
            f"{ADJECTIVES[at // nouns]}-{NOUNS[at % nouns]}"
            for at in random.sample(range(pairs), count)
        ]
    if count > adjectives * pairs:
        raise ConfigError(
            f"{count:,} different names are needed, and there are {adjectives * pairs:,}; give fewer --needles and "
            "--distractors, or smaller --lengths"
        )
    drawn = random.sample(range(adjectives * pairs), count)
    return [
        f"{ADJECTIVES[at // pairs]}-{ADJECTIVES[at % pairs // nouns]}-{NOUNS[at % nouns]}"
        for at in drawn
    ]


def number(random: Random) -> str:
    return str(random.randrange(10_000, 100_000))


@dataclass(frozen=True)
class Prompt:
    text: str  # the user's text
    cue: str  # the beginning of the answer, which the model continues
    answers: tuple[str, ...]  # all that an answer should name


@dataclass(frozen=True)
class Material:
    sentences: Sequence[str] = ()  # sentences of a real text, in order
    needles: int = 1  # values to be found
    distractors: int = 0  # needles of the same form that are not asked for

    def excerpt(self, random: Random, size: int) -> list[str]:
        start, count = random.randrange(len(self.sentences)), len(self.sentences)
        return [self.sentences[(start + at) % count] for at in range(size)]


def found(said: str, answers: Sequence[str]) -> float:
    """Compute the share of answers in the text as whole words, ignoring case (RULER's also counts inside words)."""
    hits = [
        re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", said, re.IGNORECASE)
        for answer in answers
    ]
    return sum(hit is not None for hit in hits) / len(answers)


def first_number(said: str, answers: Sequence[str]) -> float:
    """Return 1 if the text's first number is the answer, as LongEval counts."""
    number = re.search(r"\d+", said)
    return float(number is not None and number[0] == answers[0])


@dataclass(frozen=True)
class Task:
    """A kind of question; to add one, write its builder and a row of ``TASKS``."""

    name: str
    about: str  # one sentence, for ``--help`` and the page
    build: Callable[[Random, int, float, Material], Prompt]
    """Pure function of random numbers, units of length, the depth (0 beginning, 1 end) and material."""
    score: Callable[[str, Sequence[str]], float] = found
    smallest: int = 1  # units of the shortest prompt
    needs_text: bool = False
    has_depth: bool = False  # True if accuracy is reported by the depth of the answer
    # Default number of values to be found; None if the task has no such option.
    needles: int | None = None


TEXTS: Final = tomllib.loads(
    Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8")
)


def _prompt(which: str, answers: Sequence[str], **parts: object) -> Prompt:
    said = TEXTS[which]
    return Prompt(
        said["text"].format(**parts), said["cue"].format(**parts), tuple(answers)
    )


def _lines(random: Random, size: int, depth: float, material: Material) -> Prompt:
    pairs = [(name, number(random)) for name in names(random, size)]
    name, value = random.choice(pairs)
    record = "".join(
        f"line {each}: REGISTER_CONTENT is <{held}>\n" for each, held in pairs
    )
    return _prompt("lines", [value], record=record, name=name)


def _asked(
    excerpt: Sequence[str], keys: Sequence[str], answers: Sequence[str]
) -> Prompt:
    *others, last = keys
    asked = f"{', '.join(others)} and {last}" if others else last
    return _prompt("numbers", answers, excerpt=" ".join(excerpt), asked=asked)


def _needle(key: str, value: str) -> str:
    return f"One of the special numbers for {key} is: {value}."


def _keys(random: Random, size: int, depth: float, material: Material) -> Prompt:
    pairs = [(name, number(random)) for name in names(random, size)]
    key, value = random.choice(pairs)
    return _asked([_needle(*pair) for pair in pairs], [key], [value])


def _hidden(
    random: Random, size: int, depth: float | None, material: Material
) -> Prompt:
    """Hide needles in text: of one key, the first at ``depth``, or of a key each; distractors have other keys."""
    count = material.needles if depth is None else 1
    every = names(random, count + material.distractors)
    asked, others = every[:count], every[count:]
    owners = (asked if depth is None else asked * material.needles) + others
    pairs = [(key, number(random)) for key in owners]
    first = random.randint(0, size) if depth is None else round(depth * size)
    excerpt = material.excerpt(random, size)
    places = [first, *(random.randint(0, size) for _ in pairs[1:])]
    for place, needle in sorted(
        zip(places, (_needle(*pair) for pair in pairs), strict=True), reverse=True
    ):
        excerpt.insert(place, needle)
    return _asked(excerpt, asked, [value for _, value in pairs[: material.needles]])


def _queries(random: Random, size: int, depth: float, material: Material) -> Prompt:
    return _hidden(random, size, None, material)


HOPS: Final = 4
CHAINS: Final = 2


def _different(
    random: Random, count: int, alphabet: str, length: int, first: Sequence[str] = ()
) -> list[str]:
    words = list(first)
    while len(words) < count:
        word = "".join(random.choices(alphabet, k=length))
        words += [word] if word not in words else []
    return words


def _tracing(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build chains of assignments in real text, in order; the question asks for the first chain."""
    variables = _different(random, CHAINS * (HOPS + 1), ascii_uppercase, 5)
    values = random.sample(range(10_000, 100_000), CHAINS)
    excerpt = material.excerpt(random, size)
    placed: list[tuple[int, int, str]] = []
    for chain in range(CHAINS):
        own = variables[chain::CHAINS]
        sources = [str(values[chain]), *(f"VAR {name}" for name in own[:-1])]
        places = sorted(random.randint(0, size) for _ in own)
        said = (
            f"VAR {name} = {source}." for name, source in zip(own, sources, strict=True)
        )
        # Statements at the same place keep the order of their chain.
        placed += [
            (place, order, each)
            for order, (place, each) in enumerate(zip(places, said, strict=True))
        ]
    for place, _, sentence in sorted(placed, reverse=True):
        excerpt.insert(place, sentence)
    answers = variables[0::CHAINS]
    return _prompt(
        "tracing",
        answers,
        excerpt=" ".join(excerpt),
        value=values[0],
        count=len(answers),
    )


COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
FREQUENT: Final = 3
_ZETA_2: Final = 1.6449340668482264  # the sum of 1 / k^2


def _common(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build a shuffled, numbered list with ten words 30 times, and ``size`` others three times each."""
    first, others = (every := names(random, COMMON + size))[:COMMON], every[COMMON:]
    listed = first * COMMON_TIMES + others * OTHER_TIMES
    random.shuffle(listed)
    text = " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
    return _prompt("common-words", first, words=text, count=COMMON)


def _frequent(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build about ``size`` coded words with frequencies that fall as 1 / rank^2; the most frequent is only dots."""
    counts: list[int] = []
    while count := int(size / _ZETA_2 / (len(counts) + 1) ** 2):
        counts.append(count)
    words = _different(random, len(counts), ascii_lowercase, 6, ["...."])
    coded = [
        word for word, count in zip(words, counts, strict=True) for _ in range(count)
    ]
    random.shuffle(coded)
    return _prompt(
        "frequent-words", words[1 : 1 + FREQUENT], words=" ".join(coded), count=FREQUENT
    )


_SINGLE, _SEVERAL = (
    {"needs_text": True, "needles": 1},
    {"needs_text": True, "needles": 4},
)
TASKS: Final[dict[str, Task]] = {
    task.name: task
    for task in (
        Task(
            "lines",
            "Retrieve the number of one line of a record.",
            _lines,
            first_number,
        ),
        Task(
            "needle",
            "Find a number in real text, by length and depth.",
            _hidden,
            **_SINGLE,
            has_depth=True,
        ),
        Task(
            "keys",
            "Find the number of one key in a text of nothing but keys and numbers.",
            _keys,
        ),
        Task(
            "values", "Find all numbers of one key in real text.", _hidden, **_SEVERAL
        ),
        Task("queries", "Find the numbers of several keys.", _queries, **_SEVERAL),
        Task(
            "tracing",
            "Track assignments through chains of variables.",
            _tracing,
            needs_text=True,
        ),
        Task("common-words", "Name the ten words that a list has most often.", _common),
        Task(
            "frequent-words",
            "Name the three most frequent words of a coded text.",
            _frequent,
            smallest=100,
        ),
    )
}
