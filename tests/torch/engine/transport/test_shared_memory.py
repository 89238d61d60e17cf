"""Messages through memory that ranks of one host share."""

import errno
import os
import resource
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ringspan.core.errors import PeerMismatch
from ringspan.torch.engine.transport import queue
from ringspan.torch.engine.transport import shared_memory as shared
from ringspan.torch.engine.transport.agreement import agree, queues_of, shared_bytes
from ringspan.torch.engine.transport.exchange import Exchange, TensorSpec
from ringspan.torch.engine.transport.queue import OutOfStepError, SharedQueues

CPU = torch.device("cpu")


def pattern(sender, size, number):
    return torch.arange(size, dtype=torch.float32) + 1000 * sender + number


def opened(mesh, name):
    """The group of a ring that has agreed on something, which is when ranks look for each other's memory."""
    group = mesh["ring"].get_group()
    agree(group, {"test": name})
    return group, dist.get_rank(group), dist.get_world_size(group)


def reserved_bytes(group):
    """Of this group alone; earlier tests have used it too."""
    return queues_of(group).memory.reserved_bytes


def pass_around(mesh, sizes, rounds):
    group, rank, ranks = opened(mesh, "pass around")
    reserved = [reserved_bytes(group)]
    for number in range(rounds):
        exchange = Exchange(group, "pass around")
        for index, size in enumerate(sizes):
            spec = TensorSpec((size,), torch.float32, CPU)
            message = exchange.empty(spec).copy_(pattern(rank, size, number))
            # a place of one's own, or where the sender has it
            asked = spec.empty() if number % 2 else spec
            transfer, (receive,) = exchange.post(
                [((rank + 1) % ranks, message)], [((rank - 1) % ranks, asked)], index
            )
            del message
            transfer.wait()
            assert (receive.read() is asked) == number % 2
            assert torch.equal(
                receive.read(), pattern((rank - 1) % ranks, size, number)
            )
        dist.barrier(group)
        reserved.append(reserved_bytes(group))
        assert shared_bytes() >= reserved[-1]
    return reserved


@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_of_all_sizes_arrive_and_memory_is_used_again(pool, ranks):
    sizes = (1, 127, 128, 5000, 40_000, 5001)
    for reserved in pool.run(pass_around, ranks, sizes, 20):
        assert reserved[1] > 4 * 40_000, "the large ones went through shared memory"
        assert reserved[-1] - reserved[0] <= 2 * sum(
            4 * size + 4096 for size in sizes
        ), "at most one waits for a slower reader"


class Group:
    """A process group of threads, as far as shared memory asks for one."""

    def __init__(self, rank, barrier, given):
        self.rank, self.barrier, self.given = rank, barrier, given

    def all_gather(self, thing):
        self.given[self.rank] = thing
        self.barrier.wait(60)
        things = list(self.given)
        self.barrier.wait(60)
        return things


@pytest.fixture
def ranks_in_threads(monkeypatch):
    monkeypatch.setattr(shared, "gather", lambda thing, group: group.all_gather(thing))
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)

    def make(seconds=60.0):
        barrier, given = threading.Barrier(3), [None] * 3
        groups = [Group(rank, barrier, given) for rank in range(3)]
        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(partial(SharedQueues, seconds=seconds), groups))

    if not make()[0].carries(1):
        pytest.skip("no shared memory on this machine")
    return make


def test_a_missing_message_ends_with_the_rank_that_owes_it(ranks_in_threads):
    reader, _, writer = ranks_in_threads(seconds=0.1)
    expected = reader.expect(2, 5, 8)
    with pytest.raises(RuntimeError, match="rank 2 of this ring has sent nothing for"):
        reader.receive(expected)
    process = subprocess.Popen(["sleep", "60"])
    reader._pulses[2] = queue._Pulse(process.pid)
    assert reader._pulses[2].beats
    process.kill()
    reader._seconds = 60.0
    with pytest.raises(RuntimeError, match="rank 2 of this ring has ended"):
        reader.receive(expected)
    process.wait()
    writer.send(torch.arange(8, dtype=torch.uint8), 0, tag=5)
    assert reader.receive(expected).tolist() == list(range(8)), (
        "what it sent before it ended has come"
    )


def test_a_full_queue_waits_for_its_reader(ranks_in_threads):
    writer, reader, _ = ranks_in_threads()
    message, count = torch.zeros(4, dtype=torch.uint8), queue._CAPACITY + 3
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(
            lambda: [writer.send(message, 1, tag) for tag in range(count)]
        )
        time.sleep(0.1)
        assert not sending.done()
        for tag in range(count):
            reader.receive(reader.expect(0, tag, 4))
        sending.result(60)
    with pytest.raises(OutOfStepError, match="another pass"):
        writer.send(message, 1, tag=1)
        reader.receive(reader.expect(0, 2, 4))


def test_a_slot_is_free_when_nobody_has_a_tensor_on_its_message(ranks_in_threads):
    writer, *readers = ranks_in_threads()

    def start():
        return writer.memory.allocate(1 << 16).data_ptr()

    message = writer.memory.allocate(1 << 16).fill_(7)
    first = message.data_ptr()
    for rank in (1, 2):
        writer.send(message, rank, tag=5)
    assert start() != first, "the writer has it"
    del message
    assert start() != first, "nobody has read it"
    read = readers[0].receive(readers[0].expect(0, 5, 1 << 16))
    part = read.view(torch.int16)[100:]
    del read
    readers[1].receive(readers[1].expect(0, 5, 1 << 16))
    assert start() != first, "rank 1 still has a part of it"
    assert part.eq(0x0707).all()
    del part
    assert start() == first


def another_size(mesh):
    group, rank, _ = opened(mesh, "another size")
    for _ in range(2):  # what nobody received is forgotten
        transfer, _ = Exchange(group, "another size").post(
            [(1 - rank, torch.zeros(3000 + rank))],
            [(1 - rank, TensorSpec((3000 + rank,), torch.float32, CPU))],
            0,
        )
        with pytest.raises(
            PeerMismatch,
            match="rank 0: rank 1 sent 12004 bytes where 12000 were expected, rank 1: ",
        ):
            transfer.wait()


def test_a_message_of_another_size_is_refused(pool):
    pool.run(another_size, 2)
    pool.run(pass_around, 2, (5000,), 2)


def many_sizes(mesh):
    shared._IDLE_CALLS = 8
    group, rank, _ = opened(mesh, "many sizes")
    exchange, before = Exchange(group, "many sizes"), reserved_bytes(group)
    most = 0
    for number in range(60):
        spec = TensorSpec((1000 * (1 + number % 30) ** 2,), torch.float32, CPU)
        transfer, (receive,) = exchange.post(
            [(1 - rank, torch.full(spec.shape, float(number)))],
            [(1 - rank, spec)],
            number,
        )
        transfer.wait()
        assert receive.read().eq(number).all()
        del transfer
        dist.barrier(group)
        most = max(most, reserved_bytes(group))
    shared._IDLE_CALLS = 256
    return most - before


def test_memory_that_is_no_longer_used_is_given_back(pool):
    # those that were used last, of thirty
    newest = sum(4000 * number**2 + 8192 for number in range(21, 31))
    assert all(most <= newest for most in pool.run(many_sizes, 2))


def test_only_a_peer_on_this_host_is_opened():
    here, token = os.readlink("/proc/self/ns/net"), b"t" * 64
    descriptor = shared._anonymous_file(2)
    if descriptor is None:
        pytest.skip("no shared memory on this machine")
    memory = shared._Memory(descriptor)
    memory.write(0, token)
    handle = here, os.getpid(), descriptor, token
    opened = shared._open(handle, here)
    assert opened is not None and opened.read(0, 64) == token
    assert shared._open(None, here) is None, "it has no memory"
    assert shared._open(handle, "net:[1]") is None, "it is in another network"
    assert shared._open((*handle[:3], b"u" * 64), here) is None, (
        "another host's process has this number"
    )
    assert shared._open((here, os.getpid(), 9999, token), here) is None, "no such file"
    with open(os.devnull) as file:
        assert shared._open((here, os.getpid(), file.fileno(), token), here) is None, (
            "not a file in memory"
        )
    os.close(descriptor)


def test_too_many_ranks_or_another_machine_share_nothing(monkeypatch):
    assert shared._anonymous_file(shared.MAX_RANKS + 1) is None
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert shared._anonymous_file(2) is None


def limited(mesh, limit, size):
    """A ring whose last rank may use so much of something, and a message around it."""
    group, rank, ranks = opened(mesh, f"limited {limit}")
    before = resource.getrlimit(limit)
    if rank == ranks - 1:
        resource.setrlimit(limit, (size, before[1]))
    try:
        queues = SharedQueues(group, 60.0)
    finally:
        resource.setrlimit(limit, before)
    return [
        queues.carries(other) for other in range(ranks) if other != rank
    ], queues.memory.allocate(64) is not None


@pytest.mark.parametrize(
    "limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_AS], ids=["ulimit -f", "ulimit -v"]
)
def test_a_rank_with_a_limit_talks_through_sockets_and_all_know(pool, limit):
    size = 1 << 20 if limit == resource.RLIMIT_FSIZE else 1 << 40
    *others, last = pool.run(limited, 4, limit, size)
    assert last == ([False] * 3, False)
    for carried, allocates in others:
        assert allocates and carried == [True, True, False]


@pytest.mark.parametrize(
    ("module", "name", "number"),
    [
        *(
            (os, "memfd_create", number)
            for number in (None, errno.ENOSYS, errno.EMFILE)
        ),
        *(
            (os, "ftruncate", errno.EFBIG),
            (os, "readlink", errno.ENOENT),
            (shared.mmap, "mmap", errno.ENOMEM),
        ),
    ],
)
def test_what_the_system_refuses_is_no_error(
    monkeypatch, ranks_in_threads, module, name, number
):
    def refuse(*args):
        raise OSError(number, "refused")

    open_files = len(os.listdir("/proc/self/fd"))
    if number is None:
        monkeypatch.delattr(module, name)
    else:
        monkeypatch.setattr(module, name, refuse)
    ranks = ranks_in_threads()
    monkeypatch.undo()
    assert not any(rank.carries(other) for rank in ranks for other in range(3))
    assert len(os.listdir("/proc/self/fd")) == open_files
