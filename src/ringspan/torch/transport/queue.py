"""Messages between ranks of one host, without a call to anybody: a message stays where its sender made it, and a letter
in the reader's mailbox says where that is. The reader looks there when it needs it.
"""

import os
import select
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ringspan.torch.transport.shared_memory import SharedMemory

# The words of a rank: how often it asked the others what they do; for which rank it waits (counted from 1, 0 for none),
# for the how manieth message of it, and how often it has waited; its mailboxes, one for each reader.
_ASKS, _WAITS_FOR, _WAITS_NUMBER, _WAITS_COUNT, _MAILBOXES = range(5)
_LETTER: Final = 4  # words: the message's number, counted from 1, its tag, its slot, its bytes
_LETTERS: Final = 255  # in a mailbox at most
_MAILBOX: Final = 1 + _LETTERS * _LETTER  # words: how many letters were taken out of it, then the letters

_SPIN_SECONDS: Final = 2e-4  # to look again and again, for what is about to come
_SLEEP_SECONDS: Final = 1e-3  # at most, between two looks at what takes longer
_PULSE_SECONDS: Final = 0.05  # between two looks whether it can come at all


class OutOfStepError(Exception):
    """A peer does not do what this rank does, so that a message will not come."""


@dataclass(frozen=True)
class Expected:
    """A message that a peer is to send: the how manieth from it, counted from 1, with this tag and so many bytes."""

    sender: int
    number: int
    tag: int
    size: int


class Mail:
    """What this rank of a group sends to its peers on the host, and they to it.

    Between two ranks the order of ``send`` is the order of ``expect``, so a message with another tag than expected
    shows that the ranks are out of step. So does a ring of ranks each of which waits for the next one.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        """Find out, with all ranks of the group, who can read whom. A message is waited for so many seconds."""
        ranks = dist.get_world_size(group)
        self.memory = SharedMemory(group, num_words=_MAILBOXES + _MAILBOX * ranks)
        self._rank, self._seconds = dist.get_rank(group), seconds
        self._pulses = {rank: _Pulse(process) for rank, process in self.memory.peers.items()}
        self._mailboxes = {  # by sender and reader
            rank: [_Mailbox(self.memory.words(rank)[start:stop]) for start, stop in pairwise(_bounds(ranks))]
            for rank in (self._rank, *self.memory.peers)
            if self.memory.peers
        }
        self._sent, self._expected = [0] * ranks, [0] * ranks
        self._letters: dict[tuple[int, int], _Letter] = {}  # taken out of mailboxes, by sender and number
        self._questions = 0  # that all ranks have asked together since

    def carries(self, rank: int) -> bool:
        """Whether messages to and from a rank go this way; that rank says the same."""
        return rank in self.memory.peers

    def send(self, message: Tensor, reader: int, tag: int) -> None:
        """Let a rank read a message where it lies; one that does not lie in shared memory is copied there."""
        self._sent[reader] += 1
        letter = _Letter(tag, self.memory.place(message, reader), message.nbytes)
        for _ in self._patience(reader):
            if self._mailboxes[self._rank][reader].put(self._sent[reader], letter):
                return

    def expect(self, sender: int, tag: int, size: int) -> Expected:
        """The next message of a rank, which is to be received later."""
        self._expected[sender] += 1
        return Expected(sender, self._expected[sender], tag, size)

    def receive(self, expected: Expected) -> Tensor:
        """Wait for a message; its bytes, which the sender keeps as long as a tensor lies on them.

        Raises:
            OutOfStepError: it will not come, because ranks do not do the same.
            RuntimeError: its sender is gone, or has not sent it for as long as the group waits.
        """
        sender, key, words = expected.sender, (expected.sender, expected.number), self.memory.words(self._rank)
        try:
            for is_slow in self._patience(sender):
                asks = self.memory.words(sender)[_ASKS]  # before the mailbox: what it sent before it asked is there
                self._empty_mailbox(sender)
                if key in self._letters:
                    return self._open(self._letters.pop(key), expected)
                if asks > self._questions:
                    raise OutOfStepError(
                        f"rank {sender} has not sent what this rank waits for, and does something else"
                    )
                if is_slow:
                    words[_WAITS_NUMBER], words[_WAITS_FOR] = expected.number, sender + 1
                    if (waiting := self._waiting()) and waiting == self._waiting():
                        raise OutOfStepError(f"it waits for rank {sender}, which waits for others, and they for it")
        finally:
            words[_WAITS_FOR] = 0
            words[_WAITS_COUNT] += 1
        raise AssertionError("patience ends with an error")

    @contextmanager
    def asking(self) -> Iterator[Sequence[int]]:
        """While this rank asks the others what they do, they need not wait for it; how many messages each was sent."""
        if self.memory.peers:
            self.memory.words(self._rank)[_ASKS] = self._questions + 1
        yield list(self._sent)
        self._questions += 1  # as many as everybody has asked by now

    def forget(self, sent: Sequence[int]) -> None:
        """Drop what peers have sent and this rank never received; each has sent it so many messages until now."""
        for sender in self.memory.peers:
            self._empty_mailbox(sender)
            self._expected[sender] = sent[sender]
            for key in [key for key in self._letters if key[0] == sender and key[1] <= sent[sender]]:
                self.memory.release(sender, self._letters.pop(key).slot)

    def _open(self, letter: "_Letter", expected: Expected) -> Tensor:
        complaint = None
        if letter.tag != expected.tag:
            complaint = f"rank {expected.sender} sent a message of another pass"
        elif letter.size != expected.size:
            complaint = f"rank {expected.sender} sent {letter.size} bytes where {expected.size} were expected"
        if complaint:
            self.memory.release(expected.sender, letter.slot)
            raise OutOfStepError(complaint)
        return self.memory.view(expected.sender, letter.slot, letter.size)

    def _empty_mailbox(self, sender: int) -> None:
        for number, letter in self._mailboxes[sender][self._rank].take():
            self._letters[sender, number] = letter

    def _waiting(self) -> list[tuple[int, int, int]]:
        """Who waits for whom and since when, from this rank on until one comes again; empty when somebody does not.

        Found twice alike, all of them wait at once, for messages that were not there when none of them could send.
        """
        found: list[tuple[int, int, int]] = []
        rank = self._rank
        while rank not in (first for first, _, _ in found):
            if rank not in self._mailboxes:
                return []
            words = self.memory.words(rank)
            count, number, sender = words[_WAITS_COUNT], words[_WAITS_NUMBER], words[_WAITS_FOR] - 1
            if sender not in self._mailboxes or self._mailboxes[sender][rank].holds(number):
                return []
            found.append((rank, sender, count))
            rank = sender
        return found

    def _patience(self, peer: int) -> Iterator[bool]:
        """When to look again for something that a peer is to do, and whether it takes long: soon at first, then less
        often.
        """
        started = time.perf_counter()
        sleep, felt, is_slow = _SPIN_SECONDS / 8, started, False
        while True:
            yield is_slow
            now = time.perf_counter()
            if now - started < _SPIN_SECONDS:
                os.sched_yield()
                continue
            is_slow = now - felt > _PULSE_SECONDS
            if is_slow:
                felt = now
                if not self._pulses[peer].beats:
                    yield False  # it may have done it before it ended
                    raise RuntimeError(f"rank {peer} of this ring has ended")
                if now - started > self._seconds:
                    raise RuntimeError(f"rank {peer} of this ring has sent nothing for {now - started:.0f} s")
            time.sleep(sleep)
            sleep = min(_SLEEP_SECONDS, 1.5 * sleep)


def _bounds(ranks: int) -> list[int]:
    """Where the mailboxes of each reader begin, and the last one ends."""
    return [_MAILBOXES + _MAILBOX * reader for reader in range(ranks + 1)]


class _Letter(NamedTuple):
    """Where a message lies, and what it is."""

    tag: int
    slot: int
    size: int


class _Mailbox:
    """Letters from one sender to one reader. A letter is there when its number is, which is written last."""

    def __init__(self, words: "memoryview[int]") -> None:
        self._words, self._taken = words, 0

    def put(self, number: int, letter: _Letter) -> bool:
        """Write letter ``number``; whether there was room for it."""
        if number - self._words[0] > _LETTERS:
            return False
        at = self._at(number)
        self._words[at + 1], self._words[at + 2], self._words[at + 3] = letter
        self._words[at] = number
        return True

    def holds(self, number: int) -> bool:
        """Whether letter ``number`` has been written."""
        return self._words[self._at(number)] >= number

    def take(self) -> Iterator[tuple[int, _Letter]]:
        """The letters that have come since, with their numbers."""
        while self._words[at := self._at(self._taken + 1)] == self._taken + 1:
            self._taken += 1
            letter = _Letter(self._words[at + 1], self._words[at + 2], self._words[at + 3])
            self._words[0] = self._taken
            yield self._taken, letter

    @staticmethod
    def _at(number: int) -> int:
        return 1 + (number - 1) % _LETTERS * _LETTER


class _Pulse:
    """Whether a process of this host lives."""

    def __init__(self, process: int) -> None:
        self._poll = None
        with suppress(OSError):  # a sandbox that does not allow it: the watchdog, or the time-out, tells
            descriptor = os.pidfd_open(process)
            weakref.finalize(self, os.close, descriptor).atexit = False
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)

    @property
    def beats(self) -> bool:
        return self._poll is None or not self._poll.poll(0)
