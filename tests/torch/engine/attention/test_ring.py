"""The ring loop against the float64 oracle: every mask, layout, number of ranks, grouping and dtype."""

from dataclasses import replace
from functools import partial
from itertools import cycle, product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from ringspan.core import reference
from ringspan.core.codec import Sent
from ringspan.core.names import LAYOUT_NAMES
from ringspan.core.schedule import workspace
from ringspan.core.schedule.route import Route, member_heads
from ringspan.core.schedule.schedule import make_schedule
from ringspan.torch.engine.attention import ring
from ringspan.torch.engine.attention.part import sink_gradient
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.kernels.device import ruled_by, rules_of
from tests.core.strategies import masks
from tests.fuzz import examples
from tests.torch.engine.attention.assembled import assemble
from tests.torch.views import VECTORS, VIEWS, numbers_for
from tests.torch.virtual import on_ranks

# the design's Numbers: float32, relative, for out, dq, dk and dv alike
FLOAT32_LIMIT = 3e-6


@pytest.fixture(autouse=True)
def groups_of_heads(monkeypatch):
    """As many as there are key/value heads, though the tiles are small: one thread, as a rank on a machine has."""
    monkeypatch.setattr(workspace, "WORTH_A_CALL_ON_CPU", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def relative(x: np.ndarray, expected: np.ndarray, terms: np.ndarray) -> float:
    """||x - expected|| / ||expected||; where a gradient nearly cancels, against a tenth of the terms that cancelled.

    Rounding is proportional to the terms: the dq of a row with one key is the difference of two equal numbers.
    """
    size = max(
        np.linalg.norm(expected), np.linalg.norm(terms) / 10, np.finfo(float).tiny
    )
    error = np.linalg.norm(x - expected) / size
    # NaN is below every limit where it is not the first
    return float("inf") if np.isnan(error) else float(error)


def cancelling_terms(dout, q, k, v, allowed, scale, softcap=0.0, bias=None, sinks=None):
    """Sums of the absolute values of what out, dq, dk, dv and, with sinks, dsinks are sums of.

    Of a score's gradient these are two sums of products. In a row of one key they are equal, and may both happen to be
    small: half of what such sums usually are counts there, for their rounding is as usual and nothing else is left.
    """
    out, lse = reference.attention(
        q, k, v, allowed, scale, softcap=softcap, bias=bias, sinks=sinks
    )
    heads = q.shape[1] // k.shape[1]
    k_heads, v_heads = np.repeat(k, heads, 1), np.repeat(v, heads, 1)
    base = np.where(np.isneginf(lse), 0.0, lse)[..., None]
    scores = scale * (q @ k_heads.swapaxes(-1, -2))
    scores = (softcap * np.tanh(scores / softcap) if softcap else scores) + (
        0.0 if bias is None else bias
    )
    p = np.exp(np.where(allowed, scores, -np.inf) - base)
    values = v_heads.swapaxes(-1, -2)
    two_sums = np.abs(dout @ values) + np.abs((dout * out).sum(-1, keepdims=True))
    usual = np.sqrt(dout**2 @ values**2) + np.sqrt(
        ((dout * out) ** 2).sum(-1, keepdims=True)
    )
    has_one_key = allowed.sum(-1, keepdims=True) == 1
    ds = scale * p * np.where(has_one_key, np.maximum(two_sums, usual / 2), two_sums)
    summed = [(ds.swapaxes(-1, -2) @ np.abs(q)), (p.swapaxes(-1, -2) @ np.abs(dout))]
    summed = [x.reshape(*k.shape[:2], heads, *x.shape[2:]).sum(2) for x in summed]
    if sinks is not None:
        summed.append(
            (np.exp(sinks[:, None, None] - base) * np.abs(dout * out)).sum((0, 2, 3))
        )
    return [out, ds @ np.abs(k_heads), *summed]


class Problem:
    """Random tensors for one sequence, its dense truth, and what a virtual ring makes of it."""

    def __init__(
        self,
        length,
        mask,
        *,
        batch=1,
        heads=2,
        groups=2,
        size=16,
        value_size=None,
        dtype=torch.float32,
        keys=None,
        scale=None,
        softcap=0.0,
        has_slopes=False,
        has_sinks=False,
        is_uneven=False,
        views=("contiguous",) * 4,
        vectors=("contiguous",) * 2,
        device="cpu",
    ):
        """``views`` are how q, k, v and dout lie in memory, ``vectors`` how slopes and sinks do."""
        self.length, self.mask, self.keys = length, mask, keys or length
        self.scale = size**-0.5 if scale is None else scale
        self.dtype, self.is_cross, self.softcap = dtype, keys is not None, softcap
        generator = torch.Generator().manual_seed(length * 7 + heads)
        value_size = value_size or size
        shapes = (
            (batch, heads, length, size),
            (batch, groups, self.keys, size),
            (batch, groups, self.keys, value_size),
            (batch, heads, length, value_size),
        )
        self.views = [VIEWS[name] for name in views]
        self.q, self.k, self.v, self.dout = (
            numbers_for(view, torch.randn(s, generator=generator).to(dtype))
            for view, s in zip(self.views, shapes, strict=True)
        )
        if is_uneven:  # the last sequence has much larger values
            self.v[-1] *= 50
        self.slopes = torch.rand(heads, generator=generator) / 4 if has_slopes else None
        self.sinks = (
            torch.randn(heads, generator=generator).to(dtype) if has_sinks else None
        )
        if has_sinks and heads > 1:
            self.sinks[
                -1
            ] = -torch.inf  # takes nothing, and leaves rows without keys empty
        self.slopes, self.sinks = (
            None if x is None else VECTORS[name](x)
            for name, x in zip(vectors, (self.slopes, self.sinks), strict=True)
        )
        q, k, v, dout = (
            x.double().numpy() for x in (self.q, self.k, self.v, self.dout)
        )
        query_positions, key_positions = np.arange(length), np.arange(self.keys)
        allowed = mask.dense(query_positions, key_positions)
        distance = np.abs(query_positions[:, None] - key_positions)
        extra = {
            "softcap": softcap,
            "bias": None
            if self.slopes is None
            else -self.slopes.double().numpy()[:, None, None] * distance,
            "sinks": None if self.sinks is None else self.sinks.double().numpy(),
        }
        self.out, self.lse = reference.attention(q, k, v, allowed, self.scale, **extra)
        self.gradients = reference.backward(dout, q, k, v, allowed, self.scale, **extra)
        self.terms = cancelling_terms(dout, q, k, v, allowed, self.scale, **extra)
        if has_sinks:
            self.dsinks = reference.sink_gradient(
                dout, self.out, self.lse, extra["sinks"]
            )
        for name in ("q", "k", "v", "dout", "slopes", "sinks"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.to(device))

    def on_ring(
        self,
        name,
        ranks,
        route="ring",
        comm_dtype="exact",
        gradient_comm_dtype="exact",
        kernel="auto",
    ):
        """out, lse, dq, dk, dv in order, and the exchanges of forward and backward."""
        layout = rs.Layout(name, self.length, ranks)
        keys = rs.Layout(name, self.keys, ranks) if self.is_cross else layout
        spec = AttentionSpec(
            scale=self.scale,
            softcap=self.softcap,
            mask=self.mask.spec,
            layout=name,
            padding=layout.padded_length - layout.length,
            key_padding=keys.padded_length - keys.length,
            route=route,
            sent=Sent(comm_dtype, gradient_comm_dtype),
            kernel=kernel,
        )

        def passed(rank, exchange, q, k, is_backward):
            mine, ulysses = assemble(
                rank, ranks, exchange, q, k, self.slopes, spec, is_backward=is_backward
            )
            return partial(
                (ulysses or ring).backward
                if is_backward
                else (ulysses or ring).forward,
                mine,
            )

        return self.passes(layout, keys, passed)

    def passes(self, layout, keys, passed):
        """Run ``on_ring``'s steps; ``passed`` gives a rank its pass over the exchange."""

        def local(rank):
            wholes = (
                (self.q, layout),
                (self.k, keys),
                (self.v, keys),
                (self.dout, layout),
            )
            return [
                view(part(x, split, rank))
                for view, (x, split) in zip(self.views, wholes, strict=True)
            ]

        def forward(rank, exchange):
            q, k, v, _ = local(rank)
            return passed(rank, exchange, q, k, False)(q, k, v, self.sinks)

        partials, sent = on_ranks(layout.ranks, forward)

        def backward(rank, exchange):
            q, k, v, dout = local(rank)
            gradients = passed(rank, exchange, q, k, True)(
                dout, q, k, v, *partials[rank]
            )
            return *gradients, None if self.sinks is None else sink_gradient(
                dout, *partials[rank], self.sinks
            )

        gradients, sent_back = on_ranks(layout.ranks, backward)
        whole = [
            gathered([p[i] for p in partials], layout, empty)
            for i, empty in ((0, 0.0), (1, -np.inf))
        ]
        whole += [
            gathered([g[i] for g in gradients], layout if i == 0 else keys)
            for i in range(3)
        ]
        if self.sinks is not None:
            whole.append(sum(g[3].double().cpu().numpy() for g in gradients))
        return whole, sent, sent_back

    def errors(self, *where, **options):
        """Relative errors of out, dq, dk, dv and dsinks; lse is compared exactly where it is -inf."""
        (out, lse, *gradients), _, _ = self.on_ring(*where, **options)
        assert np.array_equal(np.isneginf(lse), np.isneginf(self.lse))
        seen = ~np.isneginf(lse)
        assert (out[~seen] == 0).all()
        atol = 1e-5 if self.dtype == torch.float32 and not options else 2e-1
        np.testing.assert_allclose(lse[seen], self.lse[seen], rtol=0, atol=atol)
        expected = (
            self.out,
            *self.gradients,
            *(() if self.sinks is None else (self.dsinks,)),
        )
        return list(map(relative, (out, *gradients), expected, self.terms))


def part(x: Tensor, layout: rs.Layout, rank: int) -> Tensor:
    """A rank's tokens of a sequence, NaN where the layout holds more than there are."""
    positions = layout.positions(rank)
    behind = max(0, int(positions.max(initial=-1)) + 1 - x.shape[2])
    return torch.nn.functional.pad(x, (0, 0, 0, behind), value=torch.nan)[
        :, :, positions
    ]


def gathered(parts: list[Tensor], layout: rs.Layout, empty: float = 0.0) -> np.ndarray:
    """The sequence of which ranks have these parts, ``empty`` where none holds it."""
    order = np.concatenate([layout.positions(rank) for rank in range(layout.ranks)])
    held = torch.cat(parts, 2).double().cpu().numpy()
    whole = np.full(
        (*held.shape[:2], max(order.max() + 1, layout.length), *held.shape[3:]), empty
    )
    whole[:, :, order] = held
    return whole[:, :, : layout.length]


@pytest.mark.parametrize(
    ("mask", "ranks", "layout", "size"),
    [
        (rs.causal(), 3, "zigzag", 64),
        (rs.causal(), 4, "zigzag", 128),
        (rs.causal(), 2, "striped", 128),
        (rs.full(), 3, "contiguous", 64),
        (rs.causal(), 1, "contiguous", 80),
    ],
    ids=str,
)
def test_out_and_gradients_are_those_of_dense_attention(mask, ranks, layout, size):
    """The sizes of real heads; ``test_any_mask_on_any_layout`` has everything else."""
    problem = Problem(131, mask, batch=1 + (size == 80), heads=8, groups=2, size=size)
    assert max(problem.errors(layout, ranks)) < FLOAT32_LIMIT


ROUTES = [
    "ring", "bidirectional", "double-ring:2", "all-gather", "pass-q", "ulysses", "ulysses:2", "ulysses:2+all-gather",
    "ulysses:2+pass-q",
]  # fmt: skip


def fits(route, ranks, heads, groups):
    """Whether a route has that many ranks and heads."""
    try:
        member_heads(heads, groups, Route.parse(route, ranks).ulysses)
    except rs.UnsupportedError:
        return False
    return True


@pytest.mark.parametrize(
    ("mask", "worth"),
    [(rs.causal(), 1200), (rs.documents([40, *[2] * 12]), 1000)],
    ids=["causal", "documents"],
)
def test_ranks_with_different_work_take_the_same_groups_of_heads(
    mask, worth, monkeypatch
):
    """Their messages are numbered by group. The first rank has one tile, the last one larger or many small ones."""
    monkeypatch.setattr(workspace, "WORTH_A_CALL_ON_CPU", worth)
    assert (
        max(Problem(64, mask, heads=4, groups=4).errors("contiguous", 2))
        < FLOAT32_LIMIT
    )


def shape(grouping, sizes=(8, 8), batch=1):
    return {
        "heads": grouping[0],
        "groups": grouping[1],
        "size": sizes[0],
        "value_size": sizes[1],
        "batch": batch,
    }


def shapes(groupings, sizes):
    return st.builds(
        shape, st.sampled_from(groupings), st.sampled_from(sizes), st.integers(1, 2)
    )


# First a window, which has tiles of every kind, and everything that scores can have: most bugs show there. Then one row
# of one key, whose dout . v is 45 times less than its terms; rows without keys; and rows between others of which two
# ranks send their owner nothing.
_EXAMPLE = {
    "length": 61,
    "layout": "zigzag",
    "ranks": 3,
    "route": "ring",
    "shape": shape((4, 2), batch=2),
}
_LONG = _EXAMPLE | {"shape": shape((4, 2), (12, 8), 2)}
_ONE = {
    "length": 44,
    "layout": "contiguous",
    "ranks": 1,
    "route": "ring",
    "shape": shape((1, 1), (12, 8)),
}
_EMPTY = {"length": 32, "layout": "contiguous", "ranks": 4, "shape": shape((2, 2))}
_LIES = {"views": ("contiguous",) * 4, "vectors": ("contiguous",) * 2}
_PLAIN = {
    "scale": None,
    "softcap": 0.0,
    "has_slopes": False,
    "has_sinks": False,
    "in_place": True,
} | _LIES
_ALL = {
    "scale": -0.4,
    "softcap": 2.0,
    "has_slopes": True,
    "has_sinks": True,
    "in_place": True,
} | _LIES
_MANY_VIEWS = {
    "views": (
        "tokens last",
        "expanded tokens",
        "fused, numbers interleaved",
        "expanded scalar",
    )
}
views = st.tuples(*[st.just("contiguous") | st.sampled_from(list(VIEWS))] * 4)
vectors = st.tuples(*[st.sampled_from(list(VECTORS))] * 2)


@example(mask=rs.sliding_window(17), **_EXAMPLE, **_PLAIN)
@example(mask=rs.causal(), **_LONG, **_ALL)
@example(mask=rs.causal(), **_LONG | {"route": "all-gather"}, **_ALL)
@example(
    mask=rs.causal(),
    **_EXAMPLE | {"length": 2, "ranks": 2, "layout": "striped", "route": "all-gather"},
    **_PLAIN,
)
@example(mask=rs.documents([1]), **_ONE, **_PLAIN)
@example(mask=rs.documents([3]), route="ring", **_EMPTY, **_PLAIN | {"has_sinks": True})
@example(
    mask=rs.Mask.parse("regions:0,2,8,24,,;6,8,8,24,,"),
    route="pass-q",
    **_EMPTY,
    **_PLAIN,
)
@example(mask=rs.causal(), **_EXAMPLE, **_PLAIN | {"scale": -0.4})
@example(mask=rs.sliding_window(17), **_EXAMPLE, **_PLAIN | _MANY_VIEWS)
@given(
    length=st.integers(1, 70),
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
    route=st.sampled_from(ROUTES),
    shape=shapes([(1, 1), (4, 2), (3, 1), (8, 2)], [(8, 8), (12, 8), (5, 7)]),
    scale=st.sampled_from([None, None, -0.4]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    has_slopes=st.booleans(),
    has_sinks=st.booleans(),
    views=views,
    vectors=vectors,
    in_place=st.booleans(),
)
@examples(
    120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
def test_any_mask_on_any_layout(
    length, mask, layout, ranks, route, shape, in_place, **options
):
    """``in_place``: gathered keys arrive where they are used, as on GPUs."""
    assume(fits(route, ranks, shape["heads"], shape["groups"]))
    with ruled_by(
        cpu=replace(rules_of(torch.device("cpu")), cuts_for_cores=not in_place)
    ):
        assert (
            max(Problem(length, mask, **shape, **options).errors(layout, ranks, route))
            < FLOAT32_LIMIT
        )


@pytest.mark.parametrize(
    ("view", "kernel"), zip(VIEWS, cycle(["auto", "cpu", "eager"]))
)
def test_every_kernel_computes_every_view(view, kernel):
    """A window has tiles of every kind; the value heads are smaller, so that they are filled up."""
    problem = Problem(
        40,
        rs.sliding_window(9),
        batch=2,
        heads=4,
        groups=2,
        size=8,
        value_size=5,
        views=[view] * 4,
    )
    for ranks in (1, 2):
        assert max(problem.errors("contiguous", ranks, kernel=kernel)) < FLOAT32_LIMIT


@pytest.mark.parametrize(
    ("ranks", "route", "layout"),
    [
        (4, "ulysses", "zigzag"),
        (8, "ulysses:4", "striped"),
        (8, "ulysses", "contiguous"),
    ],
)
def test_members_share_key_value_heads_when_these_are_few(ranks, route, layout):
    assert (
        max(Problem(75, rs.causal(), heads=8, groups=2).errors(layout, ranks, route))
        < FLOAT32_LIMIT
    )


@given(
    length=st.integers(1, 40),
    keys=st.integers(1, 40),
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.integers(1, 4),
    route=st.sampled_from(["ring", "pass-q"]),
    has_slopes=st.booleans(),
)
@examples(50, suppress_health_check=[HealthCheck.too_slow])
def test_cross_attention(length, keys, mask, layout, ranks, route, has_slopes):
    problem = Problem(length, mask, keys=keys, heads=4, has_slopes=has_slopes)
    assert max(problem.errors(layout, ranks, route)) < FLOAT32_LIMIT


@pytest.mark.parametrize("route", ["ring", "pass-q"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_the_error_does_not_grow_with_the_number_of_ranks(layout, route):
    problem = Problem(256, rs.causal(), heads=2, groups=1, size=32)
    for ranks in (1, 2, 4, 8, 16):
        assert max(problem.errors(layout, ranks, route)) < FLOAT32_LIMIT


@pytest.mark.parametrize(
    ("layout", "route", "kernel"),
    [
        *product(LAYOUT_NAMES, ["ring"], ["cpu", "eager"]),
        *product(["zigzag"], [way for way in ROUTES[1:] if "+" not in way], ["auto"]),
    ],
)
def test_bfloat16_is_as_good_as_on_one_device(layout, route, kernel):
    problem = Problem(
        256, rs.causal(), heads=4, groups=2, size=64, dtype=torch.bfloat16
    )
    inputs = [x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *inputs, is_causal=True, enable_gqa=True
    )
    alone = [
        x.detach().double().numpy()
        for x in (out, *torch.autograd.grad(out, inputs, problem.dout))
    ]
    limits = map(relative, alone, (problem.out, *problem.gradients), problem.terms)
    rings = (2, 4, 8, 16) if route == "ring" else (4,)
    found = [problem.errors(layout, ranks, route, kernel=kernel) for ranks in rings]
    for limit, *errors in zip(limits, *found, strict=True):
        assert max(errors) < 1.4 * limit


def test_float64_stays_float64():
    assert max(Problem(60, rs.causal(), dtype=torch.float64).errors("zigzag", 3)) < 1e-7


@pytest.mark.parametrize(
    ("comm_dtype", "limit"), [("bfloat16", 3e-3), ("int8", 1.2e-2), ("float8", 5e-2)]
)
def test_a_coded_block_has_one_error_on_any_number_of_ranks(comm_dtype, limit):
    problem = Problem(
        256, rs.causal(), batch=2, heads=4, groups=2, size=32, is_uneven=True
    )
    routes = ("ring", 2), ("ring", 4), ("ring", 8), ("all-gather", 4)
    errors = [
        max(problem.errors("zigzag", ranks, route, comm_dtype=comm_dtype))
        for route, ranks in routes
    ]
    assert limit / 10 < min(errors) and max(errors) < limit
    exact, coded = (
        problem.on_ring("zigzag", 4, comm_dtype=w)[1][0].sent_bytes
        for w in ("exact", comm_dtype)
    )
    assert coded < exact * (0.51 if comm_dtype == "bfloat16" else 0.27)


@pytest.mark.parametrize(
    ("comm_dtype", "limit"), [("bfloat16", 3e-3), ("int8", 1.2e-2)]
)
def test_what_an_owner_sends_past_idle_ranks_is_coded_as_well(comm_dtype, limit):
    """A window on zigzag: the late chunk of a rank is needed by the rank before it alone."""
    problem = Problem(256, rs.sliding_window(12), batch=2, heads=4, groups=2, size=32)
    assert any(
        send.ranges
        for hop in make_schedule(rs.Layout("zigzag", 256, 4), problem.mask, 1).hops
        for send in hop.straight
    )
    exact = problem.errors("zigzag", 4)
    assert (
        max(exact)
        < FLOAT32_LIMIT
        < max(problem.errors("zigzag", 4, comm_dtype=comm_dtype))
        < limit
    )


def test_gradients_may_travel_in_bfloat16():
    problem = Problem(256, rs.causal(), heads=4, groups=2, size=32)
    out, dq, dk, dv = problem.errors("zigzag", 4, gradient_comm_dtype="bfloat16")
    assert max(out, dq) < FLOAT32_LIMIT < min(dk, dv) and max(dk, dv) < 3e-3
