"""Needles in real text: numbers to be found by their key, after RULER's first category (Hsieh et al. 2024).

One builder, four tasks: one key at a chosen depth; a haystack of needles; several values of a key; several keys.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from ringspan.evaluate.task import Material, Prompt, Task
from ringspan.evaluate.words import names, number

SEVERAL: Final = 4


def needle(key: str, value: str) -> str:
    """Return the sentence that hides a value."""
    return f"One of the special numbers for {key} is: {value}."


def question(excerpt: Sequence[str], keys: Sequence[str], answers: Sequence[str]) -> Prompt:
    """Return the prompt around a text with needles in it."""
    *others, last = keys
    asked = f"{', '.join(others)} and {last}" if others else last
    return Prompt(
        "Some special numbers are hidden within the following text. Memorize them; I will ask you about them "
        f"afterwards.\n\n{' '.join(excerpt)}\n\nWhat are all the special numbers for {asked} mentioned in the text?",
        f"\nThe special numbers for {asked} mentioned in the text are",
        tuple(answers),
    )


def _hidden(random: Random, sentences: list[str], needles: Sequence[str], first_at: int) -> list[str]:
    """Insert the first needle before the sentence ``first_at``, the others anywhere."""
    places = [first_at, *(random.randint(0, len(sentences)) for _ in needles[1:])]
    excerpt = list(sentences)
    for place, each in sorted(zip(places, needles, strict=True), reverse=True):
        excerpt.insert(place, each)
    return excerpt


def single(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build values of one key, the first of them at ``depth``, and distractors of other keys."""
    key, *others = names(random, 1 + material.distractors)
    values = [number(random) for _ in range(material.needles)]
    hay = [needle(key, value) for value in values] + [needle(other, number(random)) for other in others]
    excerpt = _hidden(random, material.excerpt(random, size), hay, round(depth * size))
    return question(excerpt, [key], values)


def keys(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build a text of needles only, each with its own key."""
    pairs = [(name, number(random)) for name in names(random, size)]
    key, value = random.choice(pairs)
    return question([needle(*pair) for pair in pairs], [key], [value])


def queries(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build several keys in a real text, all asked for, and distractors."""
    every = names(random, material.needles + material.distractors)
    pairs = [(name, number(random)) for name in every]
    asked = pairs[: material.needles]
    first_at = random.randint(0, size)
    excerpt = _hidden(random, material.excerpt(random, size), [needle(*pair) for pair in pairs], first_at)
    return question(excerpt, [key for key, _ in asked], [value for _, value in asked])


NEEDLE: Final = Task(
    "needle", "Find a number in real text, by length and depth.", single, needs_text=True, has_depth=True, needles=1
)
KEYS: Final = Task("keys", "Find the number of one key in a text of nothing but keys and numbers.", keys)
VALUES: Final = Task("values", "Find all numbers of one key in real text.", single, needs_text=True, needles=SEVERAL)
QUERIES: Final = Task("queries", "Find the numbers of several keys.", queries, needs_text=True, needles=SEVERAL)
