"""The public operator on real process groups, and the transformations that it must survive."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ringspan as rs
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.transport.exchange import COUNTERS
from tests.torch.models import relative


def tensors(length, *, heads=4, groups=2, size=16, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(batch, n, length, size, generator=generator).to(dtype)
        for n in (heads, groups, groups, heads)
    ]


def attend_on_ring(mesh, layout, length, mask="causal", route="ring"):
    """out, dq, dk and dv of the whole sequence, gathered from real ranks through the public function."""
    group = mesh["ring"].get_group()
    if isinstance(layout, str):
        layout = rs.Layout(layout, length, dist.get_world_size(group))
    *inputs, dout = (
        rs.shard(x, layout, dist.get_rank(group), 2) for x in tensors(length)
    )
    local = [x.requires_grad_() for x in inputs]
    out = rs.ring_attention(*local, mask=mask, layout=layout, group=group, route=route)
    gradients = torch.autograd.grad(out, local, dout)
    return [rs.unshard(x, layout, group, 2) for x in (out, *gradients)]


DOCUMENTS = [41, 3, 17, 1, 5, 5, 9, 8]


def balanced(ranks):
    return rs.balanced(rs.documents(DOCUMENTS), length=sum(DOCUMENTS), ranks=ranks)


@pytest.mark.parametrize(
    ("ranks", "layout", "length", "mask", "route"),
    [
        (1, "zigzag", 45, rs.causal(), "ring"),
        (2, "contiguous", 45, rs.causal(), "ring"),
        (3, "striped", 45, rs.causal(), "ring"),
        (4, "zigzag", 45, rs.causal(), "ring"),
        (4, "contiguous", 61, rs.sliding_window(7), "ring"),
        *product(
            [4],
            ["zigzag"],
            [61],
            [rs.causal()],
            ["bidirectional", "double-ring:2", "ulysses", "ulysses:2"],
        ),
        (2, balanced(2), sum(DOCUMENTS), rs.documents(DOCUMENTS, window=19), "ring"),
        (
            3,
            balanced(3),
            sum(DOCUMENTS),
            rs.documents(DOCUMENTS, window=19),
            "all-gather",
        ),
        (3, balanced(3), sum(DOCUMENTS), rs.documents(DOCUMENTS, window=19), "pass-q"),
    ],
)
def test_real_ranks_agree_with_sdpa(pool, ranks, layout, length, mask, route):
    *inputs, dout = tensors(length)
    inputs = [x.double().requires_grad_() for x in inputs]
    allowed = torch.from_numpy(mask.dense(*[np.arange(length)] * 2))
    expected = scaled_dot_product_attention(*inputs, attn_mask=allowed, enable_gqa=True)
    expected = [expected, *torch.autograd.grad(expected, inputs, dout.double())]
    for result in pool.run(attend_on_ring, ranks, layout, length, mask, route):
        assert max(map(relative, result, expected)) < 3e-6


def uneven(mesh, layout, is_first):
    rank, group = mesh["ring"].get_local_rank(), mesh["ring"].get_group()
    if not is_first:
        attend_on_ring(mesh, "contiguous", 16)
    q, k, v, _ = tensors([8 - rank, 5 - rank][layout == "zigzag"])
    rs.ring_attention(q, k, v, layout=layout, group=group)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("layout", "tokens"),
    [(rs.balanced(rs.documents([9, 7]), length=16, ranks=2), 7), ("zigzag", 5)],
    ids=str,
)
def test_tensors_that_do_not_fit_on_one_rank_raise_on_all(
    pool, layout, tokens, is_first
):
    for outcome in pool.outcomes(uneven, 2, layout, is_first):
        assert isinstance(
            outcome, rs.PeerMismatch
        ) and "different layout: rank 0: " in str(outcome)
        assert f"{tokens} local tokens, but" in str(outcome)
    assert len(pool.run(attend_on_ring, 2, "zigzag", 12)) == 2  # they all go on


def unequal_shares(mesh):
    layout = rs.CustomLayout.of([[(0, 5)], [(5, 3)]])
    q, k, v, _ = tensors(layout.tokens_of(mesh["ring"].get_local_rank()))
    rs.ring_attention(q, k, v, layout=layout, group=mesh["ring"])


def test_a_layout_of_unequal_shares_is_refused_on_all_ranks(pool):
    for outcome in pool.outcomes(unequal_shares, 2):
        assert isinstance(outcome, rs.LayoutError) and "hold 3 to 5 tokens" in str(
            outcome
        )


def few_queries(mesh, name, queries, keys, route):
    """out, dq, dk and dv of a few queries against many keys, and the bytes that forward sent."""
    group = mesh["ring"].get_group()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    ours, theirs = rs.Layout(name, queries, ranks), rs.Layout(name, keys, ranks)
    (q, _, _, dout), (_, k, v, _) = tensors(queries), tensors(keys)
    local = [
        rs.shard(q, ours, rank, 2),
        *(rs.shard(x, theirs, rank, 2) for x in (k, v)),
    ]
    local = [x.requires_grad_() for x in local]
    before = COUNTERS.sent_bytes
    out = rs.ring_attention(
        *local, mask=rs.full(), layout=ours, key_layout=theirs, group=group, route=route
    )
    sent = COUNTERS.sent_bytes - before
    gradients = torch.autograd.grad(out, local, rs.shard(dout, ours, rank, 2))
    splits = ours, ours, theirs, theirs
    return [
        rs.unshard(x, split, group, 2)
        for x, split in zip((out, *gradients), splits, strict=True)
    ], sent


def test_few_queries_travel_to_many_keys_of_their_own_accord(pool):
    (q, _, _, dout), (_, k, v, _) = tensors(13), tensors(157)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*inputs, enable_gqa=True)
    expected = [expected, *torch.autograd.grad(expected, inputs, dout.double())]
    sent = {}
    for route in ("pass-q", "auto", "ring"):
        results = pool.run(few_queries, 4, "zigzag", 13, 157, route)
        sent[route] = sum(sent_bytes for _, sent_bytes in results)
        for result, _ in results:
            assert max(map(relative, result, expected)) < 3e-6
    assert sent["auto"] == sent["pass-q"] < sent["ring"] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_casts_what_it_casts_for_sdpa(dtype):
    q, k, v, _ = (x.requires_grad_() for x in tensors(12, dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16):
        # as a projection leaves them, and not the rotation
        values = v if dtype == torch.float64 else v.bfloat16()
        out = rs.ring_attention(q, k, values)
        expected = scaled_dot_product_attention(
            q, k, values, is_causal=True, enable_gqa=True
        )
    assert (
        out.dtype
        == expected.dtype
        == (dtype if dtype == torch.float64 else torch.bfloat16)
    )
    assert relative(out, expected) < 5e-3
    assert all(x.dtype == dtype for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize(
    "scores",
    [{}, {"softcap": 5.0}, {"slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}],
    ids=str,
)
def test_autocast_leaves_the_sums_of_the_kernels_alone(scores):
    """In its region a product of float32 scores would be one of bfloat16, in backward too when it is called there."""
    q, k, v, dout = (x.bfloat16().requires_grad_() for x in tensors(12))
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = rs.ring_attention(q, k, v, **scores)
            found.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


# What is named; what the tensors and the options of one rank are otherwise.
OTHER = [
    *(
        ("mask", {}, {"mask": other})
        for other in ("full", "window:5", "documents:10,14")
    ),
    ("layout", {}, {"layout": rs.balanced(rs.documents([17, 7]), length=24, ranks=3)}),
    ("route", {}, {"route": "all-gather"}),
    ("comm_dtype", {}, {"comm_dtype": "int8"}),
    ("scores", {}, {"softcap": 3.0}),
    ("sinks", {}, {"sinks": torch.zeros(4)}),
    *(
        ("queries", other, {})
        for other in ({"length": 12}, {"batch": 1}, {"heads": 2}, {"size": 8})
    ),
    ("keys", {"groups": 4}, {}),
    ("dtype", {"dtype": torch.bfloat16}, {}),
]


def unequal(mesh, what, of_tensors, of_options):
    is_odd = mesh["ring"].get_local_rank() == 1
    q, k, v, _ = tensors(**{"length": 8} | (of_tensors if is_odd else {}))
    options = (
        {"layout": rs.balanced(rs.documents([7, 17]), length=24, ranks=3)}
        if what == "layout"
        else {}
    )
    rs.ring_attention(
        q,
        k,
        v,
        group=mesh["ring"],
        **options | {"route": "ring"} | (of_options if is_odd else {}),
    )


@pytest.mark.parametrize(("what", "of_tensors", "of_options"), OTHER)
def test_unequal_arguments_raise_on_every_rank_first(
    pool, what, of_tensors, of_options
):
    for outcome in pool.outcomes(unequal, 3, what, of_tensors, of_options):
        assert isinstance(outcome, rs.PeerMismatch)
        assert what in str(outcome) and "rank 1" in str(outcome)
    # nothing is left in the air: the same ranks go on working
    assert len(pool.run(attend_on_ring, 3, "zigzag", 12)) == 3


def in_another_pass(mesh):
    """Rank 1 begins a forward pass where the others are in the backward pass of what all have agreed on; the error."""
    group = mesh["ring"].get_group()
    is_odd = dist.get_rank(group) == 1

    def attend(grad=True):
        q, k, v, dout = (x.requires_grad_() for x in tensors(8))
        with torch.set_grad_enabled(grad):
            out = rs.ring_attention(q, k, v, group=group)
        if grad:
            out.backward(dout)

    attend()
    with pytest.raises(rs.PeerMismatch) as error:
        attend(grad=not is_odd)
        attend(grad=not is_odd)
    attend()
    return str(error.value)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_in_another_pass_is_named_on_every_rank(pool, ranks):
    [text] = {*pool.run(in_another_pass, ranks)}
    assert "out of step: rank 0: " in text


def two_groups(mesh):
    """A ring over all ranks and rings over halves, interleaved in one process."""
    everyone, halves = mesh["ring"].get_group(), mesh["replicate"].get_group()
    q, k, v, _ = tensors(8)
    first = [
        rs.ring_attention(q, k, v, group=group)
        for group in (everyone, halves, everyone, halves)
    ]
    return bool(torch.equal(first[0], first[2]) and torch.equal(first[1], first[3]))


def test_several_rings_in_one_process_do_not_mix(pool):
    assert pool.run(two_groups, 4, replicate=2) == [True] * 4


# The operator's arguments behind q, k and v, for the tokens of one rank.
PLAIN = (None, None, str(AttentionSpec(scale=0.25)))


def test_the_operator_passes_torchs_own_checks():
    q, k, v, _ = (x.requires_grad_() for x in tensors(8))
    torch.library.opcheck(torch.ops.ringspan.ring_attention, (q, k, v, *PLAIN))


def test_a_gradient_through_the_log_sum_exp_is_refused():
    q, k, v, _ = (x.requires_grad_() for x in tensors(8))
    out, lse = torch.ops.ringspan.ring_attention(q, k, v, *PLAIN)
    assert out.requires_grad and not lse.requires_grad


def test_it_runs_under_fake_tensors_without_a_peer():
    with FakeTensorMode():
        q, k, v = (
            torch.empty(1, heads, 1 << 20, 64, requires_grad=True)
            for heads in (8, 2, 2)
        )
        layout = rs.Layout("zigzag", 1 << 20, 1)
        out = rs.ring_attention(q, k, v, layout=layout)
        out.sum().backward()
    assert out.shape == q.shape and k.grad.shape == k.shape


def test_checkpointing_can_keep_its_result(monkeypatch):
    """With the policy that saves the operator, the ring forward runs once; without it, twice."""
    from ringspan.torch.engine.attention import op as attention

    calls = []
    forward = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda *a, **o: calls.append(1) or forward(*a, **o)
    )

    def keep(ctx, operator, *args, **kwargs):
        if operator == torch.ops.ringspan.ring_attention.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(**options):
        calls.clear()
        q, k, v, _ = (x.requires_grad_() for x in tensors(16))
        out = checkpoint(
            lambda q, k, v: rs.ring_attention(q.sin(), k, v).cos(),
            q,
            k,
            v,
            use_reentrant=False,
            **options,
        )
        return torch.autograd.grad(out.sum(), (q, k, v)), len(calls)

    kept, runs = gradients(
        context_fn=partial(create_selective_checkpoint_contexts, keep)
    )
    again, runs_without = gradients()
    assert (runs, runs_without) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
