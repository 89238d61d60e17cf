"""Messages made and read in memory that ranks of one host share; gloo's socket thread would compete for the cores."""

import ctypes
import mmap
import os
import platform
import secrets
import weakref
from bisect import insort
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.torch.engine.transport.collectives import gather

MAX_RANKS: Final = 64  # most ranks of a group that shares memory: each has a byte before a slot's message

# bytes before a message: a mark for each rank, in a cache line of their own
_LINE: Final = 64
_NO_MARKS: Final = bytes(_LINE)
_PAGE: Final = mmap.PAGESIZE
_WORD: Final = 8  # bytes
_IDLE_CALLS = 256  # a slot unused for this number of allocations is freed when a new one is needed


@dataclass
class _Slot:
    """A mark per rank, then a message; rank r sets mark r while it uses the message."""

    start: int
    stop: int
    used: int = 0  # the number of the allocation that used it last

    @property
    def message(self) -> int:
        return self.start + _LINE


class SharedMemory:
    """The memory that this rank of a group shares with its peers on the host.

    Each rank has one anonymous file, as large as the machine's memory: an identifying token, some words, and slots,
    whose pages come with messages. A slot is free once no rank has a tensor on its message, so a steady state allocates
    nothing. Nothing remains when processes end. ``peers``: processes of ranks that share with this one, by rank.
    """

    def __init__(self, group: dist.ProcessGroup, num_words: int) -> None:
        """Create this rank's memory and map the others'; collective.

        Ranks exchange handles, try to open each other's files, and tell which ones they could. Only pairs that can read
        each other are ``peers``; all other messages use sockets.
        """
        token = secrets.token_bytes(_LINE)
        self._rank, self._slots, self._calls = dist.get_rank(group), list[_Slot](), 0
        self._words = slice(_LINE // _WORD, _LINE // _WORD + num_words)
        self._first_slot = -(-self._words.stop * _WORD // _PAGE) * _PAGE
        descriptor = _anonymous_file(dist.get_world_size(group))
        self._own_memory, handle = _own_memory(descriptor, token)
        handles = gather(handle, group)
        readable = {
            rank: memory
            for rank, theirs in enumerate(handles)
            if rank != self._rank
            and handle is not None
            and (memory := _open(theirs, namespace=handle[0])) is not None
        }
        readers = [
            rank
            for rank, theirs in enumerate(gather(set(readable), group))
            if self._rank in theirs
        ]
        self._peer_memory = {
            rank: readable[rank] for rank in readers if rank in readable
        }
        self.peers: dict[int, int] = {
            rank: handles[rank][1] for rank in self._peer_memory
        }
        if descriptor is not None:
            os.close(descriptor)  # all ranks have mapped it

    @property
    def reserved_bytes(self) -> int:
        return sum(slot.stop - slot.start for slot in self._slots)

    def words(self, rank: int) -> "memoryview[int]":
        """Return a rank's words, initially zero; accesses are atomic and ordered."""
        memory = self._own_memory if rank == self._rank else self._peer_memory[rank]
        assert memory is not None, "only who can share has words"
        return memory.words[self._words]

    def allocate(self, size: int) -> Tensor | None:
        """Allocate a message while a tensor lies on it; None if no peer could read it."""
        if not size or not self.peers or self._own_memory is None:
            return None
        slot = self._free_slot(size)
        return self._own_memory.view(slot.start, slot.message, size, self._rank)

    def place(self, message: Tensor, reader: int) -> int:
        """Return the slot of a message, marked for a reader; copy the message into one if necessary."""
        assert self._own_memory is not None, "nobody reads what nobody could map"
        slot = self._slot_of(message)
        if slot is None:
            slot = self._free_slot(message.nbytes)
            copy = self._own_memory.view(
                slot.start, slot.message, message.nbytes, self._rank
            )
            copy.copy_(message.view(-1).view(torch.uint8))
        self._own_memory.mark(slot.start, reader, True)
        return slot.start

    def view(self, sender: int, slot: int, size: int) -> Tensor:
        """Return a peer's message, which it keeps as long as a tensor lies on it."""
        return self._peer_memory[sender].view(slot, slot + _LINE, size, self._rank)

    def release(self, sender: int, slot: int) -> None:
        self._peer_memory[sender].mark(slot, self._rank, False)

    def _slot_of(self, message: Tensor) -> _Slot | None:
        assert self._own_memory is not None
        at = message.data_ptr() - self._own_memory.address
        return next((slot for slot in self._slots if slot.message == at), None)

    def _free_slot(self, size: int) -> _Slot:
        """Return a slot for a message of ``size`` bytes: the smallest free one that fits, or a new one.

        Slots of more than twice the size do not fit. Before a new one is made, slots that were idle for long are freed.
        """
        assert self._own_memory is not None
        self._calls += 1
        fitting = [
            slot
            for slot in self._slots
            if size <= slot.stop - slot.message <= 2 * size and self._is_free(slot)
        ]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.stop - slot.start)
        else:
            for idle in [
                slot
                for slot in self._slots
                if self._calls - slot.used > _IDLE_CALLS and self._is_free(slot)
            ]:
                self._own_memory.discard(idle.start, idle.stop)
                self._slots.remove(idle)
            slot = self._new_slot(-(-(size + _LINE) // _PAGE) * _PAGE)
        slot.used = self._calls
        return slot

    def _is_free(self, slot: _Slot) -> bool:
        assert self._own_memory is not None
        return self._own_memory.read(slot.start, _LINE) == _NO_MARKS

    def _new_slot(self, size: int) -> _Slot:
        assert self._own_memory is not None
        start = self._first_slot
        for slot in self._slots:
            if slot.start - start >= size:
                break
            start = slot.stop
        if start + size > self._own_memory.size:
            raise MemoryError(
                f"{start + size} bytes of messages are under way, more than this machine's memory"
            )
        slot = _Slot(start, start + size)
        insort(self._slots, slot, key=lambda slot: slot.start)
        return slot


class _Memory:
    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self.words = memoryview(self._map).cast("Q")
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))

    def view(self, mark: int, start: int, size: int, rank: int) -> Tensor:
        """Return some bytes; the line at ``mark`` has the rank's mark until no tensor lies on them."""
        self.mark(mark, rank, True)
        exporter = (ctypes.c_ubyte * size).from_buffer(self._map, start)
        weakref.finalize(exporter, self.mark, mark, rank, False).atexit = False
        return torch.frombuffer(exporter, dtype=torch.uint8)

    def write(self, start: int, data: bytes) -> None:
        self._map[start : start + len(data)] = data

    def read(self, start: int, size: int) -> bytes:
        return self._map[start : start + size]

    def mark(self, start: int, rank: int, is_used: bool) -> None:
        self._map[start + rank] = is_used

    def discard(self, start: int, stop: int) -> None:
        """Return the pages to the system; they read as zeros."""
        self._map.madvise(mmap.MADV_REMOVE, start, stop - start)


def _anonymous_file(ranks: int) -> int | None:
    """Return an empty in-memory file's descriptor, or None; only on x86, whose stores other cores see in order."""
    if (
        platform.system() != "Linux"
        or platform.machine() != "x86_64"
        or ranks > MAX_RANKS
    ):
        return None
    import resource  # Unix has it

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return None  # maps as large as the machine's memory, one per rank, would use that limit up
    try:
        descriptor = os.memfd_create("ringspan")
    # An old C library lacks the call; a sandbox may forbid it, and descriptors may run out.
    except (
        AttributeError,
        OSError,
    ):
        return None
    try:
        os.ftruncate(descriptor, os.sysconf("SC_PHYS_PAGES") * _PAGE)
    except OSError:  # a limit on the size of files (ulimit -f) holds for this one too
        os.close(descriptor)
        return None
    return descriptor


# Network namespace, process, descriptor and token.
_Handle = tuple[str, int, int, bytes]


def _own_memory(
    descriptor: int | None, token: bytes
) -> "tuple[_Memory | None, _Handle | None]":
    if descriptor is None:
        return None, None
    try:
        # Ranks in different network namespaces count as different hosts, whose messages should use the network.
        namespace, memory = os.readlink("/proc/self/ns/net"), _Memory(descriptor)
    except OSError:
        return None, None
    memory.write(0, token)
    return memory, (namespace, os.getpid(), descriptor, token)


def _open(handle: _Handle | None, namespace: str) -> _Memory | None:
    if handle is None or handle[0] != namespace:
        return None
    _, process, number, token = handle
    # On another host, or if processes are hidden, a file with that number has no token.
    with (
        suppress(OSError, ValueError),
        open(f"/proc/{process}/fd/{number}", "r+b", buffering=0) as file,
    ):
        memory = _Memory(file.fileno())
        return memory if memory.read(0, _LINE) == token else None
    return None
