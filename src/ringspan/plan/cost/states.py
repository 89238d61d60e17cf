"""Seconds and bytes of layers with a state, and of convolutions, over the spans of a ring.

Forward computes a span twice, from zero and from its state; backward once more, and gradients in twice the time.
"""

from functools import lru_cache
from typing import Final

from ringspan.core.geometry.layout import Layout
from ringspan.core.names import LayoutName
from ringspan.core.recurrence.traffic import Sent, halo_messages, state_messages
from ringspan.core.schedule.timing import Pass, Speeds
from ringspan.plan.model.kinds import LayerKind

_STATE_BYTES: Final = 4  # states and maps are in float32


@lru_cache(maxsize=1024)
def state_passes(
    layout: LayoutName,
    length: int,
    ranks: int,
    kind: LayerKind,
    batch: int,
    number_bytes: int,
    speeds: Speeds,
) -> tuple[Pass, Pass]:
    """Return both passes of a recurrence and convolution on the rank that receives most; rounds run in sequence."""
    split = Layout(layout, length, ranks)
    computed = batch * split.tokens_per_rank * kind.scan_flops / speeds.flops
    twice = 1.0 if ranks > 1 else 0.0
    forward, backward = (
        _exchange(split, kind, number_bytes, speeds, reverse=reverse)
        for reverse in (False, True)
    )
    return (
        _pass(computed * (1 + twice), forward, batch),
        _pass(computed * (2 + twice), backward, batch),
    )


def state_bytes(layout: Layout, kind: LayerKind, number_bytes: int) -> list[int]:
    sent = [0] * layout.ranks
    for reverse in (False, True):
        for message, num_bytes in _messages(
            layout, kind, number_bytes, reverse=reverse
        ):
            sent[message.sender] += num_bytes
    return sent


def span_states(layout: LayoutName, length: int, ranks: int) -> int:
    """Count the first rank's spans (no rank has more): each keeps the state that it takes, its map and its halo."""
    return len(Layout(layout, length, ranks).spans(0)) if ranks > 1 else 0


def _messages(
    layout: Layout, kind: LayerKind, number_bytes: int, *, reverse: bool
) -> list[tuple[Sent, int]]:
    found: list[tuple[Sent, int]] = []
    if kind.scan:
        states = state_messages(
            layout, kind.scan.state, kind.scan.map_, reverse=reverse
        )
        found += [(message, _STATE_BYTES * message.numbers) for message in states]
    if kind.halo:
        halos = halo_messages(layout, kind.channels, kind.halo, reverse=reverse)
        found += [(message, number_bytes * message.numbers) for message in halos]
    return found


def _exchange(
    layout: Layout, kind: LayerKind, number_bytes: int, speeds: Speeds, *, reverse: bool
) -> tuple[float, int, int]:
    """Return the seconds of consecutive rounds, and the busiest rank's bytes from its node and from others."""
    inside, outside = [0] * layout.ranks, [0] * layout.ranks
    rounds: dict[int, float] = {}
    for message, num_bytes in _messages(layout, kind, number_bytes, reverse=reverse):
        is_near = speeds.same_node(message.sender, message.receiver)
        (inside if is_near else outside)[message.receiver] += num_bytes
        seconds = num_bytes / (
            speeds.intra_node_bytes if is_near else speeds.inter_node_bytes
        )
        rounds[message.round] = max(rounds.get(message.round, 0.0), seconds)
    busiest = max(range(layout.ranks), key=lambda rank: (outside[rank], inside[rank]))
    return sum(rounds.values()), inside[busiest], outside[busiest]


def _pass(computed: float, exchange: tuple[float, int, int], batch: int) -> Pass:
    seconds, inside, outside = exchange
    return Pass(computed + batch * seconds, computed, batch * inside, batch * outside)
