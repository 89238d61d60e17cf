"""Attention to chosen keys on a virtual ring against the float64 oracle: any layout, documents, padding and ranks."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core import reference
from ringspan.core.names import LAYOUT_NAMES
from ringspan.core.selection import seen_in
from ringspan.families.deepseek_v4 import Entries
from ringspan.torch.engine.attention.part import sink_gradient
from ringspan.torch.engine.attention.spec import AttentionSpec, padding_of
from ringspan.torch.engine.recurrence.current import SequencePass, passing
from ringspan.torch.mechanisms.chosen_keys import chosen, indexed
from ringspan.torch.mechanisms.chosen_keys.choice import rows_now
from ringspan.torch.mechanisms.chosen_keys.windows import fetched, windows_of
from tests.fuzz import examples
from tests.torch.engine.attention.assembled import assemble
from tests.torch.engine.attention.test_ring import gathered, part
from tests.torch.virtual import on_ranks

HEADS, SIZE, VALUES, SCALE, BATCH = 3, 8, slice(0, 5), 0.5, 2


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Several of queries, and several of keys, in each test."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("SCORES_AT_ONCE", 130),
            ("_PRODUCTS_AT_ONCE", 64),
            ("_NUMBERS_AT_ONCE", 200),
        ):
            patch.setattr(chosen, name, value)
        yield


def tensors_of(length, dtype):
    """q, kv, dout, and whole numbers for the index, whose scores are often equal; all (B, heads, length, size)."""
    make = partial(torch.randn, generator=torch.Generator().manual_seed(length))
    sizes = (HEADS, SIZE), (1, SIZE), (HEADS, VALUES.stop)
    index = [
        make(BATCH, heads, length, size).mul(2).round()
        for heads, size in ((2, 4), (1, 4), (2, 1))
    ]
    return *(
        make(BATCH, heads, length, size).to(dtype) for heads, size in sizes
    ), *index


def index_scores(q, k, weights, scale):
    """``sum_h weights_h relu(scale q_h k)``: q (T, H, D), k (S, D), weights (T, H) -> (T, S)."""
    products = np.maximum(scale * np.einsum("thd,sd->ths", q, k), 0.0)
    return np.einsum("th,ths->ts", weights, products)


def chosen_keys(scores, seen, topk):
    """Return each query's ``topk`` best keys, of equal ones the first, -1 for none: (T, S) -> int32 (T, topk)."""
    keys = np.full((len(scores), topk), -1, np.int32)
    for row, first, stop in zip(range(len(scores)), *seen, strict=True):
        best = np.argsort(-scores[row, first:stop], kind="stable")[:topk]
        keys[row, : len(best)] = first + best
    return keys


def allowed_by(keys, num_keys):
    """Return a selection (..., k) as a mask (..., S)."""
    one_more = np.zeros((*keys.shape[:-1], num_keys + 1), np.bool_)
    np.put_along_axis(
        one_more, np.where(keys < 0, num_keys, keys).astype(np.int64), True, axis=-1
    )
    return one_more[..., :num_keys]


def oracle(mask, topk, sinks, tensors):
    """Return the chosen keys, out, dq, dkv and dsinks."""
    q, kv, dout, iq, ik, weights = (x.double().numpy() for x in tensors)
    seen, keys = seen_in(mask, q.shape[2])(np.arange(q.shape[2])), []
    for row in range(BATCH):
        scores = index_scores(
            iq[row].swapaxes(0, 1), ik[row, 0], weights[row, ..., 0].T, 1.0
        )
        keys.append(chosen_keys(scores, seen, topk))
    arguments = (
        q,
        kv,
        kv[..., VALUES],
        allowed_by(np.stack(keys), q.shape[2])[:, None],
        SCALE,
    )
    out, lse = reference.attention(*arguments, sinks=sinks)
    dq, dkv, dv = reference.backward(dout, *arguments, sinks=sinks)
    dkv[..., VALUES] += dv
    return np.stack(keys), out, dq, dkv, reference.sink_gradient(dout, out, lse, sinks)


def on_ring(layout, mask, topk, sinks, tensors):
    padding = padding_of(layout)
    spec = AttentionSpec(
        scale=SCALE,
        mask=mask.spec,
        layout=layout.name,
        padding=padding,
        route="all-gather",
    )

    def local(rank, exchange):
        q, kv, *rest = (part(x, layout, rank) for x in tensors)
        ring, _ = assemble(
            rank, layout.ranks, exchange, q, kv, None, spec, is_backward=False
        )
        return ring, q, kv[:, 0], rest

    def forward(rank, exchange):
        ring, q, kv, (_, iq, ik, weights) = local(rank, exchange)
        index = chosen.IndexInputs(
            iq.transpose(1, 2), ik[:, 0], weights[..., 0].transpose(1, 2), 1.0, topk
        )
        return indexed.forward(ring, q, kv, sinks, index, None, VALUES)

    made, _ = on_ranks(layout.ranks, forward)

    def backward(rank, exchange):
        ring, q, kv, (dout, *_) = local(rank, exchange)
        out, lse, keys, _ = made[rank]
        again, _, nothing, _ = indexed.forward(ring, q, kv, sinks, None, keys, VALUES)
        assert torch.equal(again, out) and not nothing.numel(), (
            "a choice that is given is that of the first pass"
        )
        dq, dkv, *_ = indexed.backward(ring, dout, q, kv, keys, VALUES, out, lse)
        return (
            keys[:, None],
            out,
            dq,
            dkv[:, None],
            sink_gradient(dout, out, lse, sinks),
        )

    *whole, dsinks = zip(*on_ranks(layout.ranks, backward)[0], strict=True)
    keys, *rest = (gathered([*parts], layout) for parts in whole)
    return keys[:, 0], *rest, torch.stack(dsinks).sum(0).numpy()


def check(layout, mask, topk, dtype, limit):
    tensors, sinks = (
        tensors_of(layout.length, dtype),
        torch.tensor([0.3, -torch.inf, 1.0], dtype=torch.float64),
    )
    keys, *found = on_ring(layout, mask, topk, sinks, tensors)
    expected_keys, *expected = oracle(mask, topk, sinks.numpy(), tensors)
    assert np.array_equal(np.sort(keys, -1), np.sort(expected_keys, -1))
    for x, truth in zip(found, expected, strict=True):
        assert np.abs(x - truth).max() <= limit * max(1, np.abs(truth).max())


@pytest.mark.parametrize(
    ("length", "size"), [(2**16 - 1, 2), (2**16, 3), (2**24 - 1, 3), (2**24, 4)]
)
def test_a_choice_is_kept_in_the_bytes_that_positions_need(length, size):
    positions = torch.tensor(
        [[-1, 0, 255, 256], [length - 1, length // 2, -1, 1]], dtype=torch.int32
    )
    kept = chosen.packed(positions, length)
    assert kept.nbytes == size * positions.numel() and torch.equal(
        chosen.unpacked(kept), positions
    )


masks = st.one_of(
    st.just(rs.causal()),
    st.builds(rs.documents, st.lists(st.integers(1, 24), min_size=1, max_size=4)),
)
layouts = st.builds(
    rs.Layout, st.sampled_from(LAYOUT_NAMES), st.integers(1, 48), st.integers(1, 4)
)


@given(layouts, masks, st.integers(1, 9))
@example(rs.Layout("zigzag", 48, 3), rs.causal(), 5)
@example(rs.Layout("striped", 41, 2), rs.documents([20, 15]), 5)
@examples(60)
def test_any_layout_gives_the_keys_and_gradients_of_the_oracle(layout, mask, topk):
    check(layout, mask, topk, torch.float64, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_other_dtypes_choose_alike_and_sum_in_float32(dtype, limit):
    check(rs.Layout("zigzag", 96, 3), rs.documents([70, 20]), 6, dtype, limit)


def test_scores_are_ordered_and_equal_ones_by_position():
    scores = torch.tensor([0.0, -0.0, -torch.inf, 2.5, -1e-45, 1e-45, 2.5, torch.inf])
    assert chosen.ordered(scores, torch.arange(8)).argsort(
        descending=True
    ).tolist() == [7, 3, 6, 5, 0, 1, 4, 2]


def test_autocast_leaves_choices_alone():
    q, k, weights = (
        torch.rand(2, 40, *sizes) - 0.5 for sizes in ((HEADS, SIZE), (SIZE,), (HEADS,))
    )
    index, blocks, found = (
        chosen.IndexInputs(q, k, weights, 1.0, 5),
        chosen.Blocks(4, 3, 1),
        [],
    )
    seen = torch.zeros(40, dtype=torch.int32), torch.arange(1, 41, dtype=torch.int32)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found += [
                chosen.choose(index, *seen),
                chosen.choose_blocks(q, k, *seen, blocks),
            ]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_queries_see_a_range_of_keys_and_odd_masks_raise():
    seen = seen_in(rs.documents([5, 3]), 8)(np.arange(9))
    assert seen.counts.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 0]
    with pytest.raises(rs.MaskError, match="use causal or documents"):
        seen_in(rs.sliding_window(3, global_tokens=2), 9)


def key_gradients(mesh, dtype):
    """Gradients (96, 2 SIZE) of keys in a window, and of entries that all tokens after them see."""
    layout, group, rank = (
        rs.Layout("striped", 96, mesh.size()),
        mesh["ring"].get_group(),
        mesh.get_rank(),
    )
    tensors = [
        x.to(torch.bfloat16).to(dtype) for x in tensors_of(96, torch.float32)[:2]
    ]
    q, k = (part(x[:1], layout, rank).contiguous().requires_grad_() for x in tensors)
    with passing(SequencePass((layout,), group)), torch.enable_grad():
        ((rows, row),) = rows_now(q.device)
        windows, pooled = windows_of(row, 1, 1), (k[:, 0] * 2).detach().requires_grad_()
        entries = fetched(pooled, windows.entries, group, is_wide=True)
        far = chosen.all_seen(windows.first, windows.stop, windows.most)
        asked: Any = SimpleNamespace(scale=SCALE, sinks=None)
        out = Entries([(rows, row, entries, far)]).attend(
            SimpleNamespace(sliding_window=40), (q, k, k), asked
        )
        made = torch.autograd.grad(out, (k, pooled), q.transpose(1, 2).detach())
    return torch.cat((made[0], made[1][:, None]), -1)


def test_gradients_are_summed_before_they_are_rounded(pool):
    def gradients(ranks, dtype):
        return gathered(
            pool.run(key_gradients, ranks, dtype), rs.Layout("striped", 96, ranks)
        )

    truth, alone, split = (
        gradients(*each)
        for each in ((1, torch.float64), (1, torch.bfloat16), (3, torch.bfloat16))
    )
    for kind in slice(0, SIZE), slice(SIZE, None):
        one, three = (np.linalg.norm((x - truth)[..., kind]) for x in (alone, split))
        assert three < 1.05 * one
