"""The tables of options: each row is drawn, few draws are refused, and a line says which draw it is."""

import random

import pytest

from tests.combinations.tables import (
    REFUSALS,
    TABLES,
    drawn,
    line_of,
    read,
    refusals_of,
    settled,
)


def draws(count=4000):
    generator = random.Random(1)
    return [drawn(generator, 4) for _ in range(count)]


def test_each_row_is_drawn_and_few_draws_are_refused():
    many = draws()
    trained = [draw for draw in many if not refusals_of(draw)]
    for name, rows in TABLES.items():
        assert {draw[name] for draw in trained} == set(rows), name
    assert 0.01 < 1 - len(trained) / len(many) < 0.15
    for refusal in REFUSALS:
        assert any(map(refusal.when, many)), refusal.message


def test_a_line_is_read_as_the_draw_that_it_is_of():
    for draw in draws(200):
        assert read(line_of(draw)) == draw == settled(draw, 4)
    with pytest.raises(ValueError, match="'folds=9': choose a row of 1, 2, 3"):
        read("mesh=ring 3; folds=9")
