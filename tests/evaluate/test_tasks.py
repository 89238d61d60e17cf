"""Prompts: as long as asked for, the same for the same seed, with what is asked for where it should be."""

import hashlib
import re
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from ringspan.core.errors import ConfigError
from ringspan.evaluate.prompts import Prompts, prose, sentences
from ringspan.evaluate.records import VERSION
from ringspan.evaluate.settings import EvalSettings
from ringspan.evaluate.tasks import (
    ADJECTIVES,
    NOUNS,
    TASKS,
    Material,
    first_number,
    found,
    names,
)

TEXT = sentences(prose())


class Characters:
    """A tokenizer with a token per character."""

    def __init__(self, template: bool = False) -> None:
        self.chat_template = "a template" if template else None

    def __call__(self, text: str, **options: Any) -> Any:
        return SimpleNamespace(input_ids=[*([] if options else [0]), *map(ord, text)])

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return f"<user>{messages[0]['content']}<assistant>"


def built(name: str, size: int, seed: int = 1, depth: float = 0.5) -> Any:
    task = TASKS[name]
    return task.build(Random(seed), size, depth, Material(TEXT, task.needles or 1, 2))


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_contains_its_answers_and_is_reproducible(name):
    prompt = built(name, 150)
    assert prompt == built(name, 150) != built(name, 150, seed=2)
    assert found(prompt.text, prompt.answers) == 1.0
    assert found(prompt.cue, prompt.answers) == 0.0
    assert len(set(prompt.answers)) == len(prompt.answers)


def test_prompts_are_those_of_this_version_of_the_records():
    """Where this fails, raise ``VERSION``, and give the new digest: old records are not continued with new prompts."""
    material = Material(("One.", "Two words."), 2, 1)
    prompts = [task.build(Random(1), 100, 0.5, material) for task in TASKS.values()]
    digest = hashlib.sha256(repr(prompts).encode()).hexdigest()[:12]
    assert (VERSION, digest) == (1, "ab5132a95187")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [5_000, 8_191])
def test_a_prompt_is_as_long_as_it_can_be(name, length):
    made = Prompts(EvalSettings(folder="m", task=name, text=()), Characters())
    if name == "common-words":
        length *= 4
    asked = made.question(length, 0.5, 3)
    whole = len(asked.ids) + asked.max_new_tokens
    longest_unit = 60 if not TASKS[name].needs_text else max(map(len, TEXT)) + 60
    assert length - longest_unit < whole <= length
    # Nothing of the questions before it: a run that continues asks the same.
    assert (
        Prompts(EvalSettings(folder="m", task=name), Characters()).question(
            length, 0.5, 3
        )
        == asked
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_length_below_the_shortest_prompt_is_refused(name):
    with pytest.raises(
        ConfigError,
        match=rf"--lengths 90: the shortest prompt of {name} takes [\d,]+ tokens",
    ):
        Prompts(EvalSettings(folder="m", task=name), Characters()).question(90, 0.5, 0)


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_a_needle_is_at_its_depth_among_distractors(depth):
    prompt = built("needle", 200, depth=depth)
    before, _, after = prompt.text.partition(prompt.answers[0])
    needles = re.findall(r"One of the special numbers for \S+ is: \d{5}\.", prompt.text)
    assert len(needles) == 3
    share = len(before) / (len(before) + len(after))
    assert abs(share - depth) < 0.15


def test_chains_of_variables_lead_to_the_value():
    prompt = built("tracing", 40)
    values: dict[str, str] = {}
    for name, source in re.findall(
        r"VAR ([A-Z]{5}) = (\d+|VAR [A-Z]{5})\.", prompt.text
    ):
        values[name] = values[source[4:]] if source.startswith("VAR") else source
    asked = re.search(r"assigned the value (\d+) in", prompt.text)
    assert asked and {
        name for name, value in values.items() if value == asked[1]
    } == set(prompt.answers)
    assert len(values) == 10


def test_common_and_frequent_words_are_those_that_occur_most():
    for name in ("common-words", "frequent-words"):
        prompt = built(name, 300)
        words = re.findall(
            r"(?<!\S)[a-z]+-[a-z]+|(?<!\S)[a-z]{6}(?!\S)", prompt.text.split("\n\n")[1]
        )
        counts = sorted(
            ((words.count(word), word) for word in set(words)), reverse=True
        )
        top = len(prompt.answers)
        assert {word for _, word in counts[:top]} == set(prompt.answers)
        assert counts[top - 1][0] > counts[top][0]


def test_the_chat_template_is_used_unless_told_otherwise():
    length, cue = 3_000, "line "
    with_it = Prompts(
        EvalSettings(folder="m", task="lines"), Characters(template=True)
    ).question(length, None, 0)
    text = "".join(map(chr, with_it.ids))
    assert text.startswith("<user>Below") and f"number.<assistant>{cue}" in text
    plain = Prompts(
        EvalSettings(folder="m", task="lines", plain=True), Characters(template=True)
    )
    assert "<user>" not in "".join(map(chr, plain.question(length, None, 0).ids))


@pytest.mark.parametrize(
    ("said", "answers", "all_of", "first"),
    [
        ("24169>", ["24169"], 1.0, 1.0),
        ("is 24169, not 11111", ["24169", "11111"], 1.0, 1.0),
        ("11111 or 24169", ["24169"], 1.0, 0.0),
        ("124169", ["24169"], 0.0, 0.0),
        ("", ["24169"], 0.0, 0.0),
        ("BRAVE-Otter", ["brave-otter", "calm-ox"], 0.5, 0.0),
    ],
)
def test_answers_are_scored_by_whole_words(said, answers, all_of, first):
    assert found(said, answers) == all_of
    assert first_number(said, answers) == first


def test_names_are_different_however_many():
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) and len(set(NOUNS)) == len(NOUNS)
    for count in (1, len(ADJECTIVES) * len(NOUNS), len(ADJECTIVES) * len(NOUNS) + 1):
        assert len(set(names(Random(0), count))) == count
