"""Passes of attention to chosen keys against ``core/schedule/choosing.py``: messages, their order and bytes, waits, and
what is held beside scores, chosen keys and results.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.names import BATCH_LAYOUT_NAMES
from ringspan.core.schedule.choosing import ChoosingPart, backward, forward
from ringspan.core.selection import exchanged
from ringspan.measure.trace.tracker import MemoryTracker
from ringspan.torch.engine.attention.part import accumulation_dtype
from ringspan.torch.engine.attention.spec import AttentionSpec, padding_of
from ringspan.torch.mechanisms.chosen_keys import chosen, indexed
from tests.fuzz import examples
from tests.torch.engine.attention.assembled import assemble
from tests.torch.engine.attention.test_events import Alone, held

BATCH, HEADS, SIZE, KEYS, TOPK = 2, 3, 8, 4, 5

ZEROS = {
    dtype: torch.zeros((), dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.int32)
}


def nothing(*shape, dtype=torch.float32):
    """Zeros that take no memory."""
    return ZEROS[dtype].expand(shape)


@pytest.fixture(autouse=True, scope="module")
def without_computing():
    """Only what is exchanged is held, and gradients of keys."""

    def attend(q, keys, columns, values, scale, sinks):
        return nothing(*q.shape, dtype=q.dtype), nothing(*q.shape[:3])

    def attend_backward(dout, q, keys, columns, values, scale, out, lse):
        return nothing(*q.shape), keys.new_zeros(keys.shape, dtype=lse.dtype)

    def choose(index, first, stop):
        return nothing(BATCH, len(first), TOPK, dtype=torch.int32)

    with (
        patch.multiple(
            indexed, attend=attend, attend_backward=attend_backward, choose=choose
        ),
        patch.object(indexed.Fetch, "at", lambda fetch, columns: columns),
        patch.object(indexed.Fetch, "columns", lambda fetch, positions: positions),
    ):
        yield


def real(run):
    tracker, exchange = MemoryTracker(), Alone()
    run(exchange)  # what rows see is remembered
    exchange.log.clear()
    with tracker:
        run(exchange)
    return exchange.log, max(
        (moment.total_bytes for moment in tracker.moments), default=0
    )


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    layout=st.sampled_from(BATCH_LAYOUT_NAMES),
    ranks=st.integers(2, 5),
    rank=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    is_shared=st.booleans(),
)
@examples(40)
def test_passes_send_wait_and_hold_what_their_events_say(
    lengths, layout, ranks, rank, dtype, is_shared
):
    rank %= ranks
    split = batch_layout(layout, sum(lengths), ranks, lengths)
    assume(len({split.tokens_of(each) for each in range(ranks)}) == 1)
    mask, tokens = rs.documents(lengths), split.tokens_of(rank)
    spec = AttentionSpec(
        scale=1.0,
        mask=mask.spec,
        layout=getattr(split, "spec", split.name),
        route="all-gather",
        padding=0 if layout == "balanced" else padding_of(split),
    )
    q, kv = (
        nothing(BATCH, HEADS, tokens, SIZE, dtype=dtype),
        torch.zeros(BATCH, tokens, SIZE, dtype=dtype),
    )
    ring, _ = assemble(
        rank, ranks, Alone(), q, kv[:, None], None, spec, is_backward=False
    )
    inputs = (
        nothing(BATCH, tokens, 1, KEYS),
        torch.zeros(BATCH, tokens, KEYS),
        nothing(BATCH, tokens, 1),
    )
    index = chosen.IndexInputs(*inputs, 1.0, 1)
    row = indexed._row_of(ring, q)
    given = nothing(BATCH, tokens, TOPK, dtype=torch.int32)
    asks = not is_shared and row.most > index.topk
    part = ChoosingPart(
        rank,
        exchanged(row.layout, mask, rank),
        own=tokens,
        key_bytes=BATCH * SIZE * dtype.itemsize,
        gradient_bytes=BATCH * SIZE * accumulation_dtype(dtype).itemsize,
        index_bytes=BATCH * KEYS * 4 if asks else 0,
    )

    def ahead(exchange):
        mine = replace(ring, exchange=exchange)
        indexed.forward(
            mine,
            q,
            kv,
            None,
            None if is_shared else index,
            given if is_shared else None,
            slice(0, SIZE),
        )

    def back(exchange):
        mine, lse = replace(ring, exchange=exchange), nothing(*q.shape[:3])
        indexed.backward(mine, q, q, kv, given, slice(0, SIZE), q, lse)

    assert real(ahead) == held(part, forward)
    assert real(back) == held(part, backward)
