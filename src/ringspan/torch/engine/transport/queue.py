"""Messages between ranks of one host through queues in shared memory, without system calls.

A message stays where its sender made it. The sender writes a descriptor (tag, slot, size) into a queue that it shares
with the receiver; the receiver polls the queue when it needs the message, and reads the message in place.
"""

import os
import select
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Final, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ringspan.torch.engine.transport.shared_memory import SharedMemory

# The shared words of a rank, by index: the number of comparisons that it has requested; the rank that it waits for
# (plus 1, or 0), the sequence number of the message that it waits for, the number of waits that have ended; then its
# queues, one for each reader.
_REQUESTS, _WAITS_FOR, _WAITS_NUMBER, _WAITS_COUNT, _QUEUES = range(5)
_DESCRIPTOR_WORDS: Final = 4  # sequence number (from 1), tag, slot, size in bytes
_CAPACITY: Final = 255  # descriptors in a queue
# The number of descriptors that the reader has taken, then the descriptors.
_QUEUE_WORDS: Final = 1 + _CAPACITY * _DESCRIPTOR_WORDS

_SPIN_SECONDS: Final = 2e-4  # busy polling at first
_SLEEP_SECONDS: Final = 1e-3  # at most, between two polls after that
_PULSE_SECONDS: Final = 0.05  # between two checks that the sender is alive


class OutOfStepError(Exception):
    """Error that a peer makes other calls, so that an expected message will not come."""


class Expected(NamedTuple):
    """A message expected from a peer: sequence number (from 1), tag and bytes."""

    sender: int
    number: int
    tag: int
    size: int


class SharedQueues:
    """The queues between this rank of a group and its peers on the host, one for each direction of each pair.

    Sends and expectations have one order, so another tag, or a cycle of waiting ranks, shows ranks out of step.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        """Negotiate readable memory with all ranks; waits time out after ``seconds``."""
        ranks = dist.get_world_size(group)
        self.memory = SharedMemory(group, num_words=_QUEUES + _QUEUE_WORDS * ranks)
        self._rank, self._seconds = dist.get_rank(group), seconds
        # A peer that shares memory is a process of this host, and the kernel can tell whether it has ended.
        self._pulses = {
            rank: _Pulse(process) for rank, process in self.memory.peers.items()
        }
        bounds = range(_QUEUES, _QUEUES + _QUEUE_WORDS * ranks + 1, _QUEUE_WORDS)
        self._queues = {  # keys are senders, items readers
            rank: [
                _Queue(self.memory.words(rank)[start:stop])
                for start, stop in pairwise(bounds)
            ]
            for rank in (self._rank, *self.memory.peers)
            if self.memory.peers
        }
        self._sent, self._expected = [0] * ranks, [0] * ranks
        self._received: dict[
            tuple[int, int], _Descriptor
        ] = {}  # taken out of queues, by sender and sequence number
        self._comparisons = 0  # comparisons that all ranks have made together

    def carries(self, rank: int) -> bool:
        """Return whether messages to and from a rank use shared memory; both ranks agree."""
        return rank in self.memory.peers

    def send(self, message: Tensor, reader: int, tag: int) -> None:
        """Send a message without copying, unless it is outside of shared memory."""
        self._sent[reader] += 1
        descriptor = _Descriptor(
            tag, self.memory.place(message, reader), message.nbytes
        )
        for _ in self._patience(reader):
            if self._queues[self._rank][reader].put(self._sent[reader], descriptor):
                return

    def expect(self, sender: int, tag: int, size: int) -> Expected:
        self._expected[sender] += 1
        return Expected(sender, self._expected[sender], tag, size)

    def receive(self, expected: Expected) -> Tensor:
        """Wait for a message, whose bytes its sender keeps; OutOfStepError if ranks differ, RuntimeError if late."""
        sender, key, words = (
            expected.sender,
            (expected.sender, expected.number),
            self.memory.words(self._rank),
        )
        try:
            for is_slow in self._patience(sender):
                # Read before the queue, which then has everything that the sender sent earlier.
                requests = self.memory.words(sender)[_REQUESTS]
                self._drain(sender)
                if key in self._received:
                    return self._open(self._received.pop(key), expected)
                # The sender compares with all ranks instead of sending, so the two are in different calls.
                if requests > self._comparisons:
                    raise OutOfStepError(
                        f"rank {sender} has not sent what this rank waits for, and does something else"
                    )
                if is_slow:
                    words[_WAITS_NUMBER], words[_WAITS_FOR] = (
                        expected.number,
                        sender + 1,
                    )
                    # Asked twice, since the words of several ranks are not read at one moment: see ``_waiting``.
                    if (waiting := self._waiting()) and waiting == self._waiting():
                        raise OutOfStepError(
                            f"it waits for rank {sender}, which waits for others, and they for it"
                        )
        finally:
            words[_WAITS_FOR] = 0
            # Lets ``_waiting`` of another rank tell two waits for the same message apart.
            words[_WAITS_COUNT] += 1
        raise AssertionError("patience ends with an error")

    @contextmanager
    def comparing(self) -> Iterator[Sequence[int]]:
        """Compare all ranks while waiting peers join in; yield the number of messages sent to each rank."""
        if self.memory.peers:
            self.memory.words(self._rank)[_REQUESTS] = self._comparisons + 1
        yield list(self._sent)
        self._comparisons += 1  # the same number on all ranks by now

    def forget(self, sent: Sequence[int]) -> None:
        for sender in self.memory.peers:
            self._drain(sender)
            self._expected[sender] = sent[sender]
            for key in [
                key
                for key in self._received
                if key[0] == sender and key[1] <= sent[sender]
            ]:
                self.memory.release(sender, self._received.pop(key).slot)

    def _open(self, descriptor: "_Descriptor", expected: Expected) -> Tensor:
        problem = None
        if descriptor.tag != expected.tag:
            problem = f"rank {expected.sender} sent a message of another pass"
        elif descriptor.size != expected.size:
            problem = f"rank {expected.sender} sent {descriptor.size} bytes where {expected.size} were expected"
        if problem:
            self.memory.release(expected.sender, descriptor.slot)
            raise OutOfStepError(problem)
        return self.memory.view(expected.sender, descriptor.slot, descriptor.size)

    def _drain(self, sender: int) -> None:
        for number, descriptor in self._queues[sender][self._rank].take():
            self._received[sender, number] = descriptor

    def _waiting(self) -> list[tuple[int, int, int]]:
        """Return a cycle of ranks that wait for each other, as (rank, awaited rank, waits so far), or nothing.

        The same cycle found twice is a deadlock.
        """
        found: list[tuple[int, int, int]] = []
        rank = self._rank
        while rank not in (first for first, _, _ in found):
            if rank not in self._queues:
                return []
            words = self.memory.words(rank)
            count, number, sender = (
                words[_WAITS_COUNT],
                words[_WAITS_NUMBER],
                words[_WAITS_FOR] - 1,
            )
            if sender not in self._queues or self._queues[sender][rank].holds(number):
                return []
            found.append((rank, sender, count))
            rank = sender
        return found

    def _patience(self, peer: int) -> Iterator[bool]:
        """Yield while waiting for a peer: after spinning, then after sleeps of growing length.

        It yields True now and then, if the caller should look for a deadlock. Raises RuntimeError once the peer's
        process has ended, or after the time-out.
        """
        started = time.perf_counter()
        sleep, felt, is_slow = _SPIN_SECONDS / 8, started, False
        while True:
            yield is_slow
            now = time.perf_counter()
            # Most messages come within microseconds, less than a sleep takes; but the sender may need this core.
            if now - started < _SPIN_SECONDS:
                os.sched_yield()
                continue
            is_slow = now - felt > _PULSE_SECONDS
            if is_slow:
                felt = now
                # Checked rarely, because it is a system call.
                if not self._pulses[peer].beats:
                    yield False  # the peer may have sent the message before it ended
                    raise RuntimeError(f"rank {peer} of this ring has ended")
                if now - started > self._seconds:
                    raise RuntimeError(
                        f"rank {peer} of this ring has sent nothing for {now - started:.0f} s"
                    )
            time.sleep(sleep)
            sleep = min(_SLEEP_SECONDS, 1.5 * sleep)


class _Descriptor(NamedTuple):
    tag: int
    slot: int
    size: int


class _Queue:
    """Ring buffer of descriptors with one sender and reader; a sequence number, written last, makes one valid."""

    def __init__(self, words: "memoryview[int]") -> None:
        self._words, self._taken = words, 0

    def put(self, number: int, descriptor: _Descriptor) -> bool:
        if number - self._words[0] > _CAPACITY:
            return False
        at = self._at(number)
        # The number is written last: a reader that sees it may read the rest.
        self._words[at + 1], self._words[at + 2], self._words[at + 3] = descriptor
        self._words[at] = number
        return True

    def holds(self, number: int) -> bool:
        return self._words[self._at(number)] >= number

    def take(self) -> Iterator[tuple[int, _Descriptor]]:
        while self._words[at := self._at(self._taken + 1)] == self._taken + 1:
            self._taken += 1
            descriptor = _Descriptor(
                self._words[at + 1], self._words[at + 2], self._words[at + 3]
            )
            self._words[0] = self._taken
            yield self._taken, descriptor

    @staticmethod
    def _at(number: int) -> int:
        return 1 + (number - 1) % _CAPACITY * _DESCRIPTOR_WORDS


class _Pulse:
    def __init__(self, process: int) -> None:
        self._poll = None
        # A sandbox may not allow it; then the watchdog or the time-out notices.
        with suppress(OSError):
            descriptor = os.pidfd_open(process)
            weakref.finalize(self, os.close, descriptor).atexit = False
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)

    @property
    def beats(self) -> bool:
        return self._poll is None or not self._poll.poll(0)
