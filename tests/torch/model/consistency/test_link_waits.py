"""A link is to blame for waits that a late sender does not explain, whatever their clocks say."""

import random

import pytest

from ringspan.torch.model.consistency.link_waits import ClockBounds, waits_by_sender


def test_only_the_wait_after_a_message_was_sent_counts():
    awaited = {(1, 0): [(10.0, 12.0)], (2, 0): [(12.0, 12.5)], (1, 3): [(20.0, 20.1)]}
    posted = [{}, {(0, 0): [11.5], (0, 3): [15.0]}, {(0, 0): [3.0], (1, 0): [99.0]}]
    waits = waits_by_sender(0, awaited, posted, [0.0, 0.0, 0.0])
    assert waits == pytest.approx({1: 0.6, 2: 0.5})


def test_a_sender_that_is_late_is_not_the_links_fault():
    waits = waits_by_sender(
        0, {(1, 0): [(10.0, 12.0)]}, [{}, {(0, 0): [12.0]}], [0.0, 0.0]
    )
    assert waits == {1: 0.0}


def test_a_senders_clock_is_set_by_what_it_is_ahead():
    waits = waits_by_sender(
        0, {(1, 0): [(10.0, 12.0)]}, [{}, {(0, 0): [111.5]}], [0.0, 100.0]
    )
    assert waits == {1: 0.5}


def test_messages_that_do_not_match_blame_nobody():
    awaited = {(1, 0): [(10.0, 12.0)], (1, 1): [(12.0, 13.0)], (2, 0): [(13.0, 14.0)]}
    posted = [{}, {(0, 0): [1.0, 2.0], (0, 1): [1.0]}, {(0, 0): [1.0]}]
    assert waits_by_sender(0, awaited, posted, [0.0] * 3) == {2: 1.0}


@pytest.mark.parametrize("ahead", [-5000.0, 0.0, 3.0])
def test_bounds_of_clocks_hold_the_truth_and_narrow(ahead):
    """Rounds that two ranks enter and leave at drawn moments; one clock is ahead and drifts by 50 ppm."""
    draw, clocks, widths = random.Random(1), ClockBounds(), list[float]()
    for number in range(30):
        entered = [10 * number + 0.2 * draw.random() for _ in range(2)]
        left = [max(entered) + 0.2 * draw.random() for _ in range(2)]
        theirs = [ahead + (1 + 5e-5) * each for each in (entered[1], left[1])]
        clocks.narrow((entered[0], left[0]), {1: (theirs[0], theirs[1])})
        low = clocks.least_ahead(1)
        truth = ahead + 5e-5 * left[0]
        assert low <= truth + 1e-9
        widths.append(truth - low)
    assert max(widths[10:]) < 0.05 < widths[0]
