"""Messages of all ranks as NCCL matches them: between two ranks by order, without tags or buffers.

Gloo, which the other tests run on, has both, and would hide a wrong order.
"""

from collections import deque

import pytest

import ringspan as rs
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.layout import Layout
from ringspan.core.schedule import events, gather
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.steps import Part, Post
from ringspan.core.schedule.workspace import Shape
from tests.cases import pairwise

TOKENS = 12
MASKS = {
    "causal": lambda length: rs.causal(),
    "full": lambda length: rs.full(),
    "window": lambda length: rs.sliding_window(TOKENS + 3),
    "documents": lambda length: rs.documents(documents_of(length)),
}


def documents_of(length):
    return [length // 2, 5, length - length // 2 - 5]


def posts_of(layout, mask, route, groups, walk, rank):
    """The posts of one rank: messages to and from others, with their bytes."""
    shape = Shape(1, 2, 2, 4, 4, 4)
    schedule = make_schedule.__wrapped__(layout, mask, rank, None, route)
    tokens = layout.tokens_of(rank)
    part = Part(schedule, shape, tokens, tokens, head_groups=groups)
    return deque(event for event in walk(part) if isinstance(event, Post))


def finish(ranks):
    """Let every rank run its posts, one after the other, as on one stream; return what can never be matched.

    A post ends when each of its messages has met its other half: the next one, in that direction between the two ranks,
    of the post in which the other rank is.
    """
    open_ = dict.fromkeys(range(len(ranks)))
    moved = True
    while moved:
        moved = False
        for rank, posts in enumerate(ranks):
            if not open_[rank] and posts:
                post = posts.popleft()
                open_[rank] = [
                    ("to", one.peer, one.buffer.num_bytes) for one in post.sends
                ]
                open_[rank] += [
                    ("from", one.peer, one.buffer.num_bytes) for one in post.receives
                ]
                moved = True
        for rank, left in open_.items():
            for message in [each for each in left or () if each[0] == "to"]:
                _, peer, num_bytes = message
                there = next(
                    (each for each in open_[peer] or () if each[:2] == ("from", rank)),
                    None,
                )
                if there:
                    assert there[2] == num_bytes, "bytes of a message differ"
                    left.remove(message)
                    open_[peer].remove(there)
                    moved = True
    return {rank: left for rank, left in open_.items() if left}, [
        len(posts) for posts in ranks
    ]


@pytest.mark.parametrize(
    ("ranks", "mask", "layout", "route", "groups", "walk"),
    pairwise(
        (2, 3, 4, 6, 8),
        tuple(MASKS),
        ("contiguous", "zigzag", "striped", "balanced"),
        ("ring", "bidirectional", "double-ring:2", "all-gather", "pass-q"),
        (1, 2),
        ("forward", "backward"),
    ),
)
def test_every_send_meets_its_receive_without_a_deadlock(
    ranks, mask, layout, route, groups, walk, monkeypatch
):
    """Also where a gather is cut into posts of few messages, on each rank elsewhere."""
    monkeypatch.setattr(gather, "MOST_MESSAGES", 4)
    if route == "double-ring:2" and (ranks % 2 or ranks == 2):
        route = "ring"
    length = ranks * TOKENS
    if layout == "balanced":
        made = batch_layout("balanced", length, ranks, documents_of(length))
    else:
        made = Layout(layout, length, ranks)
    way = Route.parse(route, ranks)
    way = way.backward if walk == "backward" else way
    asked = MASKS[mask](length), way, groups, getattr(events, walk)
    all_posts = [posts_of(made, *asked, rank) for rank in range(ranks)]
    assert finish(all_posts) == ({}, [0] * ranks)
