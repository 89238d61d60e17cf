"""The judge of slow ranks and links, from recorded and drawn figures of windows."""

import random

import pytest

from ringspan.torch.model.consistency.slowness import (
    WINDOW_STEPS,
    Judge,
    Link,
    RankTimes,
)

HOSTS = ["a", "a", "b", "b"]
QUIET = RankTimes(1e-9, 0.4, 0.05, 1.0)
RING = {(0, 1): 0.01, (1, 2): 0.03, (2, 3): 0.01, (3, 0): 0.02}


def judged(
    windows: int, times: list[RankTimes], links: dict[Link, float] | None = None
) -> list[tuple[int, str]]:
    """The lines of so many windows of the same figures, with the step that a window ends with."""
    judge = Judge(HOSTS)
    return [
        (first + WINDOW_STEPS - 1, line)
        for first in range(1, windows * WINDOW_STEPS, WINDOW_STEPS)
        for line in judge.judge(first, times, links)
    ]


def test_a_slow_rank_is_named_once_within_twenty_steps():
    slow = RankTimes(1.4e-9, 0.56, 0.0, 1.0)
    waiting = RankTimes(1e-9, 0.4, 0.2, 1.0)
    [(step, line)] = judged(8, [waiting, waiting, slow, waiting])
    assert step == 16 and line == (
        "rank 2 (b) computes 1.4 times as long as the median since step 1; the others wait up to 0.16 s a step for it"
    )


def test_a_slow_link_is_named_once_within_twenty_steps():
    [(step, line)] = judged(8, [QUIET] * 4, RING | {(1, 2): 0.3})
    assert step == 16 and line == (
        "the link from rank 1 (a) to rank 2 (b) is slow since step 1; rank 2 waits 0.3 s a step for what rank 1 has "
        "already sent, over the median link 0.02 s"
    )


def test_links_between_hosts_are_not_held_to_those_within():
    between = {(1, 2): 0.3, (3, 0): 0.25}
    assert judged(8, [QUIET] * 4, RING | between) == []


def test_links_that_a_slow_one_delays_are_not_named_beside_it():
    links = {(0, 1): 0.15, (1, 2): 0.02, (2, 3): 0.8, (3, 0): 0.0, (1, 0): 0.0}
    lines = judged(8, [QUIET] * 4, links | {(3, 2): 0.01, (2, 1): 0.3})
    assert [line[:24] for _, line in lines] == ["the link from rank 2 (b)"]


def test_a_short_wait_of_a_link_is_not_worth_a_line():
    assert judged(8, [QUIET] * 4, RING | {(0, 1): 0.025}) == []


def test_more_work_is_not_slowness():
    busy = RankTimes(1e-9, 0.8, 0.0, 1.0)
    waiting = RankTimes(1e-9, 0.4, 0.45, 1.0)
    assert judged(8, [waiting, busy, waiting, waiting]) == []


def test_what_is_fast_again_is_said_and_can_be_slow_again():
    judge = Judge(HOSTS)
    slow = [QUIET, QUIET, RankTimes(2e-9, 0.8, 0.0, 1.0), QUIET]
    lines = list[str]()
    for window in range(12):
        is_quiet = window in (4, 5, 6, 7)
        links = RING if is_quiet else RING | {(1, 2): 0.3}
        lines += judge.judge(
            1 + WINDOW_STEPS * window, [QUIET] * 4 if is_quiet else slow, links
        )
    ends = ["no longer" in line or "as fast" in line for line in lines]
    assert ends == [False, False, True, True, False, False]
    assert all(line.endswith("since step 17") for line in lines[2:4])


@pytest.mark.parametrize("seed", range(20))
def test_any_slow_rank_and_link_are_named_in_noise(seed):
    """Steps of which other processes lengthen two in five: drawn sizes, ranks, factors and links."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 12)
    hosts = [f"host {rank // draw.randint(1, 4)}" for rank in range(ranks)]
    culprit, factor = draw.randrange(ranks), draw.choice((1.5, 2.0))
    links = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    # Another rank's link, with another one of its kind to compare it with.
    kinds = [hosts[sender] == hosts[receiver] for sender, receiver in links]
    slow_links = [
        link for link, kind in zip(links, kinds, strict=True) if kinds.count(kind) > 1
    ]
    slow_link = draw.choice(slow_links)
    starts = 1 + WINDOW_STEPS * 100
    judge, named = Judge(hosts), list[tuple[int, str]]()
    for window in range(110):
        first = 1 + WINDOW_STEPS * window
        is_slow = first >= starts
        times = list[RankTimes]()
        for rank in range(ranks):
            slower = factor if is_slow and rank == culprit else 1.0
            computing = slower * min(_noisy(draw) for _ in range(WINDOW_STEPS))
            times.append(RankTimes(1e-9 * computing, 0.3 * computing, 0.1, 1.0))
        waits = {
            link: min(0.02 * _noisy(draw) for _ in range(WINDOW_STEPS))
            + 0.2 * (is_slow and link == slow_link)
            for link in links
        }
        lines = judge.judge(first, times, waits)
        named += [(first + WINDOW_STEPS - 1, line) for line in lines]
    sender, receiver = slow_link
    wanted = {
        f"rank {culprit} ({hosts[culprit]}) computes",
        f"the link from rank {sender} ({hosts[sender]}) to rank {receiver} ({hosts[receiver]}) is",
    }
    assert len(named) == 2
    for step, line in named:
        assert starts < step < starts + 20
        assert any(line.startswith(begin) for begin in wanted)
        wanted = {begin for begin in wanted if not line.startswith(begin)}


def _noisy(draw: random.Random) -> float:
    return 1 + 0.1 * draw.random() + 3 * (draw.random() < 0.4) * draw.random()
