"""The oldest entries are forgotten, whatever was read since."""

from ringspan.core.remembered import Remembered


def test_the_oldest_entry_is_forgotten():
    found = Remembered(2)
    for number in (1, 2, 1, 3):
        found[number] = -number
    assert dict(found) == {2: -2, 3: -3}
    assert found.get(1) is None


def test_an_entry_that_is_set_again_forgets_nothing():
    found = Remembered(1)
    found["a"], found["a"] = 1, 2
    assert dict(found) == {"a": 2}
