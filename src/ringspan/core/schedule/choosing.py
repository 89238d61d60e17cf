"""Events of one rank in a pass of attention to keys that an index chooses (``ringspan.torch.mechanisms.chosen_keys``).

The index's keys, then the keys of attention, arrive from all ranks that hold some that are seen here; backward fetches
the latter again, and sends their gradients to their owners.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from ringspan.core.schedule.steps import (
    MESSAGES_PER_HOP,
    Buffer,
    Compute,
    Event,
    Message,
    Post,
    Steps,
    Wait,
    Work,
    drop,
    make,
)
from ringspan.core.selection import Tokens

# A float32: the index's divergence from attention, 0 unless the index learns.
_LOSS_BYTES: Final = 4


@dataclass(frozen=True)
class ChoosingPart:
    """One rank's part: the ``tokens`` that it exchanges, those it holds (``own``), and the bytes of a token.

    ``index_bytes``: bytes of an index's key, 0 if a choice is shared or they are part of the others. ``choosing`` and
    ``attending`` are ``Work``.
    """

    rank: int
    tokens: Tokens
    own: int
    key_bytes: int
    gradient_bytes: int
    index_bytes: int = 0
    choosing: float = 0
    attending: float = 0

    @property
    def fetched(self) -> int:
        return max(1, sum(count for _, count in self.tokens.received))


def forward(part: ChoosingPart) -> Iterator[Event]:
    index = (yield from _start(part, part.index_bytes, 0)) if part.index_bytes else None
    keys = yield from _start(part, part.key_bytes, MESSAGES_PER_HOP)
    if index is not None:
        yield from index.finish()
        yield Compute(Work(part.choosing), 0)
    yield from keys.finish()
    yield Compute(Work(part.attending + (part.choosing if index is None else 0)), 0)
    loss = yield from make(_LOSS_BYTES)
    yield from drop(loss, keys.total, *([index.total] if index else []))


def backward(part: ChoosingPart) -> Iterator[Event]:
    keys = yield from _start(part, part.key_bytes, 0)
    yield from keys.finish()
    gradients = yield from make(part.gradient_bytes * part.fetched)
    yield Compute(Work(part.attending), 0)
    yield from drop(keys.total)
    own = yield from _start(part, part.gradient_bytes, 1, is_back=True)
    yield from drop(gradients)
    yield from own.finish()
    yield from drop(own.total)


class _Moving(NamedTuple):
    message: int
    sends: tuple[Message, ...]
    came: list[Buffer]
    total: Buffer
    is_posted: bool

    def finish(self) -> Iterator[Event]:
        if self.is_posted:
            yield Wait(self.message)
        yield from drop(*(message.buffer for message in self.sends), *self.came)


def _start(
    part: ChoosingPart, token: int, message: int, *, is_back: bool = False
) -> Steps[_Moving]:
    """Start sending tokens that others need, ``token`` bytes each, and receiving theirs; ``is_back``: the reverse."""
    sent, received = reversed(part.tokens) if is_back else part.tokens
    sends: list[Message] = []
    came: list[Buffer] = []
    for peer, count in sent:
        buffer = yield from make(token * count)
        if peer == part.rank:
            came.append(buffer)
        else:
            sends.append(Message(peer, buffer))
    receives: list[Message] = []
    for peer, count in received:
        if peer != part.rank:
            receives.append(Message(peer, (yield from make(token * count))))
    if sends or receives:
        yield Post(message, tuple(sends), tuple(receives))
    total = yield from make(
        token * (part.own if is_back else part.fetched), is_sum=True
    )
    came += [buffer for _, buffer in receives]
    return _Moving(message, tuple(sends), came, total, bool(sends or receives))
