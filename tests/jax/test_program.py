"""What is compiled: how often blocks travel, how large anything gets, and how little differs between ranks."""

import re

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs ringspan[jax]")

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.names import LAYOUT_NAMES
from ringspan.core.schedule import events, steps, workspace
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.workspace import Shape
from ringspan.jax import sharded_ring_attention
from ringspan.jax.program import compile_program
from tests.cases import long
from tests.core.strategies import layouts, lengths, masks
from tests.fuzz import examples
from tests.jax.rings import mesh

LENGTH, HEADS, GROUPS, SIZE, CHUNK = 2048, 4, 2, 16, 64


def compiled(
    ranks: int,
    mask: rs.Mask,
    *,
    backward: bool,
    heads: int = HEADS,
    groups: int = GROUPS,
):
    x = [
        jax.ShapeDtypeStruct((1, n, LENGTH, SIZE), jnp.float32)
        for n in (heads, groups, groups, heads)
    ]

    def attention(q, k, v):
        return sharded_ring_attention(
            q, k, v, mesh=mesh(sp=ranks), mask=mask, query_chunk=CHUNK, key_chunk=CHUNK
        )

    def both(q, k, v, dout):
        out, differentiate = jax.vjp(attention, q, k, v)
        return out, *differentiate(dout)

    return (
        jax.jit(both).lower(*x) if backward else jax.jit(attention).lower(*x[:3])
    ).compile()


def permutes(text: str) -> list[tuple[int, ...]]:
    """Shapes of what the collective-permutes of a compiled program send, those in a loop once for each of its trips."""
    found: list[tuple[str, tuple[int, ...]]] = []
    loops: dict[
        str, tuple[str, int]
    ] = {}  # by its body: where a loop is, and its trips
    here = ""
    for line in text.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            here = opened[1]
        if loop := re.search(r" while\(.*?body=%?([\w.\-]+)(.*)", line):
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop[2])
            # chunk loops, in which nothing may be sent
            loops[loop[1]] = (
                here,
                int(known[1]) if known else 0,
            )
        if sent := re.search(
            r"= \(?f32\[([\d,]+)\]\S* collective-permute(?:-start)?\(", line
        ):
            found.append((here, tuple(map(int, sent[1].split(",")))))

    def times(place: str) -> int:
        around, trips = loops.get(place, ("", 1))
        assert trips, "sent in a loop whose length is not known"
        return trips * times(around) if around else trips

    return [shape for place, shape in found for _ in range(times(place))]


@pytest.mark.parametrize("ranks", [*long(1, 2), 4])
def test_forward_sends_keys_and_values_in_n_minus_1_messages(ranks):
    program = compiled(ranks, rs.causal(), backward=False)
    message = (GROUPS, 2 * LENGTH // ranks, SIZE)
    assert permutes(program.as_text()) == [message] * (ranks - 1)


def received(layout: rs.Layout, mask: rs.Mask, rank: int, walk) -> list[int]:
    """The numbers of the transfers by which something comes to a rank in a pass."""
    part = events.Part(
        make_schedule(layout, mask, rank), Shape(1, HEADS, GROUPS, SIZE, SIZE, 4)
    )
    return [
        event.number
        for event in walk(part)
        if isinstance(event, steps.Post) and event.receives
    ]


def test_backward_sends_each_gradient_round_the_ring():
    """A message more than the events of a pass have: a gradient travels from the first hop on, when it has nothing of
    other ranks yet.
    """
    ranks = 4
    program = compiled(ranks, rs.causal(), backward=True)
    layout = rs.Layout("zigzag", LENGTH, ranks)
    counts = [
        len(received(layout, rs.full(), 0, walk))
        for walk in (events.forward, events.backward)
    ]
    assert (
        len(permutes(program.as_text())) == sum(counts) + 1 == 2 * (ranks - 1) + ranks
    )


@given(layout=layouts, mask=masks)
@examples(100)
def test_blocks_go_as_many_hops_as_any_rank_needs_them(layout, mask):
    """All ranks run the same program, so that one which needs no more blocks still passes them on."""
    numbers = [
        n
        for rank in range(layout.ranks)
        for n in received(layout, mask, rank, events.forward)
    ]
    hops = [number // steps.MESSAGES_PER_HOP for number in numbers]
    assert compile_program(layout, layout, mask, 64, 64).num_hops == 1 + max(
        hops, default=0
    )


def test_a_window_stops_the_ring():
    x = [jax.ShapeDtypeStruct((1, 2, 512, SIZE), jnp.float32)] * 3
    attention = jax.jit(
        lambda q, k, v: sharded_ring_attention(
            q, k, v, mesh=mesh(sp=8), mask="window:65", layout="contiguous"
        )
    )
    # 64 tokens per rank: one neighbour
    assert len(permutes(attention.lower(*x).compile().as_text())) == 1


@pytest.mark.parametrize("ranks", [4, *long(8)])
def test_nothing_is_larger_than_the_tensors_of_a_rank(ranks):
    """Not S x S, not T x T, and nothing N-fold: neither a single array nor all temporaries together."""
    tokens = LENGTH // ranks
    program = compiled(ranks, rs.causal(), backward=True)
    local = HEADS * tokens * SIZE  # queries, and keys with values, of a rank
    arrays = [
        np.prod([int(n) for n in dims.split(",")])
        for dims in re.findall(r"f32\[([\d,]+)\]", program.as_text())
    ]
    assert (
        CHUNK * CHUNK * HEADS // GROUPS
        <= local
        == GROUPS * tokens * 2 * SIZE
        < tokens * tokens
    )
    assert max(arrays) == local
    # Two blocks, two gradient blocks and what is added to them, dq, out, lse, delta and chunks; not the blocks of all
    # 8 ranks, kept from forward to backward or sent ahead.
    assert program.memory_analysis().temp_size_in_bytes / 4 < 9 * local


@pytest.mark.long
def test_one_group_of_heads_after_the_other_holds_less(monkeypatch):
    ranks, heads = 4, 8
    at_once = compiled(ranks, rs.causal(), backward=True, heads=heads, groups=heads)
    monkeypatch.setattr(workspace, "WORTH_A_CALL_ON_CPU", 0)
    in_turn = compiled(ranks, rs.causal(), backward=True, heads=heads, groups=heads)
    # Dividing all by eight but out and lse, which backward needs whole: 2.1 of the tensors of a rank, once 14.3.
    assert (
        in_turn.memory_analysis().temp_size_in_bytes
        < at_once.memory_analysis().temp_size_in_bytes / 5
    )
    assert permutes(in_turn.as_text()) == [(1, 2 * LENGTH // ranks, SIZE)] * heads * (
        2 * (ranks - 1) + ranks
    )


@pytest.mark.parametrize(
    ("layout", "lists"), [("contiguous", 3), ("zigzag", 3), ("striped", 2)]
)
def test_causal_attention_takes_few_lists_on_any_number_of_ranks(layout, lists):
    """Own block, earlier block, later block; of striped, the diagonal with or without itself."""
    for ranks in (4, 16):
        split = rs.Layout(layout, ranks * 64, ranks)
        assert len(compile_program(split, split, rs.causal(), 16, 16).runs) == lists


@given(
    length=lengths,
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.integers(1, 5),
    chunks=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
@examples(150)
def test_every_allowed_pair_is_computed_exactly_once(
    length, mask, layout, ranks, chunks
):
    split = rs.Layout(layout, length, ranks)
    program = compile_program(split, split, mask, *chunks)
    tokens = split.tokens_per_rank
    for rank in range(ranks):
        for hop in range(ranks):
            owner = (rank - program.direction * hop) % ranks
            expected = mask.dense(split.positions(rank), split.positions(owner))
            expected &= (split.positions(rank) < length)[:, None] & (
                split.positions(owner) < length
            )
            counts = np.zeros((tokens, tokens), dtype=np.int64)
            row = program.which[rank, hop]
            for query, first, number in program.runs[row, : program.num_runs[row]]:
                counts[
                    query : query + program.query_size,
                    first : first + number * program.key_size,
                ] += 1
            i, j = np.indices((tokens, tokens))
            for query, key, first, number in program.partial[
                row, : program.num_partial[row]
            ]:
                inside = (
                    (i >= query)
                    & (i < query + program.query_size)
                    & (j >= key)
                    & (j < key + program.key_size)
                )
                here = np.zeros_like(inside)
                for q0, q1, k0, k1, lo, hi in program.bands[first : first + number]:
                    here |= (
                        (i >= q0)
                        & (i < q1)
                        & (j >= k0)
                        & (j < k1)
                        & (i - j >= lo)
                        & (i - j <= hi)
                    )
                assert (here & inside).any()
                counts += here & inside
            assert np.array_equal(counts, expected)
            assert hop < program.num_hops or not expected.any()
