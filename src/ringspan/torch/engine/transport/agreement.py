"""Agreement of a group's ranks before any message, and each group's shared-memory queues."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Never, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringspan.core.errors import PeerMismatch, UnsupportedError
from ringspan.core.remembered import Remembered
from ringspan.torch.engine.transport.collectives import gather
from ringspan.torch.engine.transport.queue import SharedQueues
from ringspan.torch.runtime.mesh import timeout_seconds

NOTHING: Final = nullcontext()
"""A context that does nothing, made once: each pass enters several."""
_KNOWN_FACTS: Final = 4096  # sets of facts remembered for a group; packed batches bring new ones with every step
OF_BATCH: Final = frozenset(
    {"layout", "keys' layout", "queries", "keys", "values", "length", "mask"}
)
"""Facts that follow from a batch."""


@dataclass
class _Group:
    known: Remembered[tuple[Any, ...], None] = field(
        default_factory=partial(Remembered, _KNOWN_FACTS)
    )
    # Agreed facts without those ``OF_BATCH``.
    others: set[tuple[Any, ...]] = field(default_factory=set)
    facts: dict[str, Any] = field(default_factory=dict)
    queues: SharedQueues | None = None
    guard: "_Guard" = field(default_factory=lambda: _Guard())
    is_fake: bool = False


class _Answer(NamedTuple):
    facts: dict[str, Any]
    problem: str | None
    sent: Sequence[int]  # number of messages sent to each rank


_groups: WeakKeyDictionary[dist.ProcessGroup, _Group] = WeakKeyDictionary()
_compared: Final[list[dist.ProcessGroup]] = []


def queues_of(group: dist.ProcessGroup) -> SharedQueues | None:
    """Return a group's queues between ranks on one host, once it has agreed; None if absent."""
    return _groups[group].queues if group in _groups else None


def shared_bytes() -> int:
    """Return this process's memory for messages that peers read in place."""
    return sum(
        group.queues.memory.reserved_bytes for group in _groups.values() if group.queues
    )


def agree(group: dist.ProcessGroup | None, facts: dict[str, Any]) -> None:
    """Raise PeerMismatch on all ranks unless a group's ranks were given the same facts; ask only about new ones.

    With shared memory, a rank that sees a peer compare, or make other calls, joins in (``report_out_of_step``).
    """
    if not _talks(group):
        return
    here = _of(group)
    here.facts = facts
    key = tuple(facts.items())
    if key in here.known:
        return
    others = tuple(fact for fact in facts.items() if fact[0] not in OF_BATCH)
    if others not in here.others or group not in _compared:
        _compare(group, here)
    # Queues are created by all ranks together, and after the first comparison all are here.
    if here.queues is None and dist.get_backend(group) == "gloo":
        here.queues = SharedQueues(group, timeout_seconds(group, torch.device("cpu")))
    here.others.add(others)
    # All ranks forget the same facts, since they agree on the order.
    here.known[key] = None


@contextmanager
def compared_batch(group: dist.ProcessGroup) -> Iterator[None]:
    """Take facts that differ only by the batch as agreed, since ranks have compared it."""
    _compared.append(group)
    try:
        yield
    finally:
        _compared.pop()


def compare_refused(group: dist.ProcessGroup | None, facts: dict[str, Any]) -> None:
    """Compare before this rank raises for a call, if others would wait (at first, or with shared memory)."""
    if _talks(group) and ((here := _of(group)).queues or not here.known):
        here.facts = facts
        _compare(group, here)


def one_at_a_time(group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """Guard one pass of a thread over a group; UnsupportedError for another thread's."""
    return _of(group).guard if _talks(group) else NOTHING


class _Guard(AbstractContextManager[None]):
    """A lock that is not waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise UnsupportedError(
                "two threads compute attention over one process group at once; give each thread a group of its own "
                "(dist.new_group)"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _talks(group: dist.ProcessGroup | None) -> TypeGuard[dist.ProcessGroup]:
    """Return whether there are other, real ranks."""
    return group is not None and group.size() > 1 and not _of(group).is_fake


def _of(group: dist.ProcessGroup) -> _Group:
    """Return what is known of a group."""
    found = _groups.get(group)
    if found is None:
        is_fake = dist.get_backend(group) == "fake"
        found = _groups[group] = _Group(is_fake=is_fake)
    return found


def report_out_of_step(group: dist.ProcessGroup, problem: str) -> Never:
    """Compare all ranks' calls after a message is known to be lost; PeerMismatch on every rank."""
    _compare(group, _groups[group], problem)
    raise AssertionError("a reported problem always raises PeerMismatch")


def _compare(
    group: dist.ProcessGroup, here: _Group, problem: str | None = None
) -> None:
    """Exchange all ranks' facts, problems and numbers of sent messages; raise PeerMismatch if any differ.

    Messages that were sent before and not received are dropped.
    """
    if here.queues is None:
        answers = gather(_Answer(here.facts, problem, ()), group)
    else:
        with here.queues.comparing() as sent:
            answers: list[_Answer] = gather(_Answer(here.facts, problem, sent), group)
        # Otherwise messages of a failed pass would be taken for messages of the next one.
        here.queues.forget([answer.sent[dist.get_rank(group)] for answer in answers])
    for name in dict.fromkeys(name for answer in answers for name in answer.facts):
        values = [answer.facts.get(name) for answer in answers]
        if any(value != values[0] for value in values):
            raise PeerMismatch(
                f"the ranks of this ring were given different {name}: {_by_rank(values)}; give all of them the same"
            )
    if any(answer.problem for answer in answers):
        problems = _by_rank([answer.problem or "nothing unusual" for answer in answers])
        raise PeerMismatch(f"the ranks of this ring are out of step: {problems}")


def _by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
