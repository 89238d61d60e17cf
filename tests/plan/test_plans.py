"""The planner answers as it did: some 700 committed plans, to the byte."""

import json

import pytest

from tests.fuzz import FACTOR
from tests.plan.plans import COUNT, FILE, answer, answers, questions

ROWS = json.loads(FILE.read_text())


def test_the_questions_are_those_of_the_file():
    assert [asked for asked, _ in ROWS] == list(questions())
    assert len(ROWS) == COUNT and sum(len(answered) > 1 for _, answered in ROWS) > COUNT // 2


@pytest.mark.parametrize("number", range(0, COUNT, 70))
def test_a_plan_is_as_committed(number):
    asked, expected = ROWS[number]
    assert answer(asked) == expected, asked


@pytest.mark.hypothesis
@pytest.mark.skipif(FACTOR <= 1, reason="`make fuzz` makes all of them")
def test_every_plan_is_as_committed():
    found = answers([asked for asked, _ in ROWS])
    assert [row for row, now in zip(ROWS, found, strict=True) if row[1] != now] == []
