"""Options together: what is drawn at random trains as on one process, or is refused by all ranks alike."""

import random
from collections import Counter

import pytest

from tests.combinations.judging import judge
from tests.combinations.tables import drawn, line_of

DRAWS = 4  # for each part, so that `make test` spends about a minute; `make fuzz` runs thousands of them


@pytest.mark.parametrize("part", range(6))
def test_options_at_random_train_as_on_one_process(pool, part):
    generator, kinds = random.Random(part), Counter[str]()
    for _ in range(DRAWS):
        draw = drawn(generator, pool.size)
        outcome = judge(pool, draw)
        kinds[outcome.kind] += 1
        again = f"python -m tests.combinations.run {line_of(draw)!r}"
        assert outcome.is_right, f"{outcome.kind}; {again}\n{outcome.said}"
    assert kinds["equal"] > DRAWS // 2
