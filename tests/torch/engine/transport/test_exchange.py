"""What the exchange hands to torch, and what becomes of ranks that are given different things."""

import time
from dataclasses import replace
from random import Random
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.torch.engine.transport.exchange import COUNTERS, Exchange, TensorSpec


def test_receives_are_posted_before_sends(monkeypatch: pytest.MonkeyPatch):
    # Otherwise gloo's request for a block waits behind the block that goes the other way: half the bandwidth.
    posted = []
    monkeypatch.setattr(dist, "P2POp", lambda operation, *_, **__: operation)
    monkeypatch.setattr(
        dist, "batch_isend_irecv", lambda operations: posted.extend(operations) or []
    )
    block = torch.zeros(3)
    exchange, before = Exchange(Mock(dist.ProcessGroup), "a pass"), replace(COUNTERS)
    exchange.post(
        [(1, block), (2, block)],
        [(1, TensorSpec.like(block)), (2, TensorSpec.like(block))],
        0,
    )[0].wait()
    assert posted == [dist.irecv, dist.irecv, dist.isend, dist.isend]
    assert (
        COUNTERS.num_sends - before.num_sends == 2
        and COUNTERS.sent_bytes - before.sent_bytes == 24
    )


def of_size(
    group: dist.ProcessGroup,
    tokens: int,
    mask: str = "causal",
    *,
    backward: bool = False,
) -> None:
    x = torch.ones(1, 2, tokens, 8, requires_grad=True)
    out = rs.ring_attention(x, x, x, mask=mask, group=group)
    if backward:
        out.sum().backward()


# one through sockets, one through shared memory too
KNOWN = [
    (32, "causal"),
    (64, "full"),
]
CASES: dict[str, tuple[tuple[int, str], tuple[int, str], str]] = {
    # what rank 1 does, what the others do, and what differs
    "new shape": ((48, "causal"), KNOWN[0], "queries"),
    "new mask": ((64, "window:9"), KNOWN[1], "mask"),
    "others new": (KNOWN[0], (48, "causal"), "queries"),
    "both known": (KNOWN[1], KNOWN[0], "queries"),
    "both new": ((40, "causal"), (48, "causal"), "queries"),
}


def unequal(mesh: DeviceMesh, name: str, delay: int) -> float:
    """Rank 1 is given something else, and one rank comes late; return the seconds to the refusal."""
    group, rank = dist.new_group(range(mesh.size())), dist.get_rank()
    for _ in range(2):
        for known in KNOWN:
            of_size(group, *known, backward=True)
    first, others, differs = CASES[name]
    dist.barrier()
    if delay == rank:
        time.sleep(0.1)
    started = time.perf_counter()
    with pytest.raises(rs.PeerMismatch, match=f"different {differs}") as caught:
        of_size(group, *(first if rank == 1 else others))
    seconds = time.perf_counter() - started
    values = [
        value.partition(": ")[2].strip(", ")
        for value in str(caught.value).partition(";")[0].split("rank ")[1:]
    ]
    assert "not heard" not in str(caught.value), "no time-out is waited for"
    assert (
        values == [values[0], values[1], values[0], values[0]]
        and values[0] != values[1]
    )
    return seconds


@pytest.mark.parametrize(
    ("name", "delay"), [(name, number % 2) for number, name in enumerate(CASES)]
)
def test_a_rank_that_is_given_something_else_is_named_by_all(pool, name, delay):
    pool.run(unequal, 4, name, delay)


@pytest.mark.alone
def test_a_rank_with_different_input_is_named_in_half_a_second(pool):
    # At least once: other programs may take the time of a rank, or of several.
    assert any(max(pool.run(unequal, 4, "both known", 1)) < 0.1 + 0.5 for _ in range(5))


def in_the_middle(mesh: DeviceMesh) -> str:
    """Rank 2 leaves a backward pass out and goes on with something new, while the others are in it."""
    group, rank = dist.new_group(range(mesh.size())), dist.get_rank()
    for _ in range(2):
        of_size(group, *KNOWN[1], backward=True)
    with pytest.raises(rs.PeerMismatch) as caught:
        of_size(group, *KNOWN[1], backward=rank != 2)
        of_size(group, 48)
    return str(caught.value)


def test_a_rank_that_leaves_a_pass_out_is_named_by_all(pool):
    for message in pool.run(in_the_middle, 4):
        assert (
            message.count("(1, 2, 64, 8)") == 3 and "rank 2: (1, 2, 48, 8)" in message
        )


def uneven(mesh: DeviceMesh, calls: int) -> None:
    """Known and new things in turn, on ranks that come at random times, some of which need no other."""
    group, random = dist.new_group(range(mesh.size())), Random(dist.get_rank())
    sizes = Random(0)
    for number in range(calls):
        tokens = (
            8 * (1 + number // 4) if sizes.random() < 0.3 else sizes.choice((32, 64))
        )
        time.sleep(random.choice((0, 0, 0, 0.01)))
        of_size(
            group,
            tokens,
            sizes.choice(("causal", "full", "window:3")),
            backward=sizes.random() < 0.5,
        )


def test_ranks_that_are_late_or_early_raise_no_alarm(pool):
    pool.run(uneven, 4, 60)
