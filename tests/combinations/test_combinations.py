"""Options together: what is drawn at random trains as on one process, or is refused by all ranks alike."""

import random
from collections import Counter

import pytest

from tests.cases import long
from tests.combinations.judging import judge
from tests.combinations.tables import drawn, line_of

# Of each part, which takes a quarter of a minute: `make test` has one, `make long` all, and `make fuzz` runs thousands.
DRAWS = 4


@pytest.mark.parametrize("part", [0, *long(1, 2, 3, 4, 5)])
def test_options_at_random_train_as_on_one_process(pool, part):
    generator, kinds = random.Random(part), Counter[str]()
    for _ in range(DRAWS):
        draw = drawn(generator, pool.size)
        outcome = judge(pool, draw)
        kinds[outcome.kind] += 1
        again = f"python -m tests.combinations.run {line_of(draw)!r}"
        assert outcome.is_right, f"{outcome.kind}; {again}\n{outcome.said}"
    assert kinds["equal"] > DRAWS // 2
