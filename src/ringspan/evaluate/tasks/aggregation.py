"""Aggregation, RULER's third category: common words in a list and in a coded text."""

from random import Random
from string import ascii_lowercase
from typing import Final

from ringspan.evaluate.task import Material, Prompt, Task
from ringspan.evaluate.words import names

COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
FREQUENT: Final = 3
_ZETA_2: Final = 1.6449340668482264  # the sum of 1 / k^2


def common(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build a shuffled, numbered list with ten words 30 times, and ``size`` others three times each."""
    first, others = (every := names(random, COMMON + size))[:COMMON], every[COMMON:]
    listed = first * COMMON_TIMES + others * OTHER_TIMES
    random.shuffle(listed)
    text = " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
    return Prompt(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n\n{text}\n\nWhat are the {COMMON} most common words in the above list?",
        f"\nThe {COMMON} words that appear most often in the list are:",
        tuple(first),
    )


def frequent(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build about ``size`` coded words with frequencies that fall as 1 / rank^2; the most frequent is only dots."""
    counts: list[int] = []
    while count := int(size / _ZETA_2 / (len(counts) + 1) ** 2):
        counts.append(count)
    words = ["...."]
    while len(words) < len(counts):
        word = "".join(random.choices(ascii_lowercase, k=6))
        words += [word] if word not in words else []
    coded = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    random.shuffle(coded)
    return Prompt(
        "Read the following coded text and track the frequency of each coded word. Ignore the dots '....'.\n\n"
        f"{' '.join(coded)}\n\nWhat are the {FREQUENT} most frequent coded words in the above text?",
        f"\nThe {FREQUENT} most frequent coded words in the above text are:",
        tuple(words[1 : 1 + FREQUENT]),
    )


COMMON_WORDS: Final = Task("common-words", "Name the ten words that a list has most often.", common)
FREQUENT_WORDS: Final = Task(
    "frequent-words", "Name the three most frequent words of a coded text.", frequent, smallest=100
)
