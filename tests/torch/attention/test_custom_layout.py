"""The ring loop over layouts of any runs: unequal shares, ranks that hold nothing, queries and keys dealt out apart."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core import reference
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.schedule import choice
from ringspan.core.schedule.schedule import make_schedule
from ringspan.torch.attention import ring
from ringspan.torch.attention.op import _positions
from ringspan.torch.attention.spec import AttentionSpec
from ringspan.torch.kernels.score_mod import Scores
from tests.core.schedule.test_schedule import exists
from tests.core.strategies import custom_layouts, masks
from tests.fuzz import examples
from tests.torch.attention.test_ring import FLOAT32_LIMIT, cancelling_terms, relative
from tests.torch.virtual import on_ranks

ROUTES = ["ring", "bidirectional", "double-ring:2", "all-gather", "pass-q"]
HEADS, GROUPS, SIZE = 4, 2, 8


@pytest.fixture(autouse=True)
def groups_of_heads(monkeypatch):
    """As many as there are key/value heads, though the tiles are small."""
    monkeypatch.setattr(choice, "WORTH_A_CALL_ON_CPU", 0)


class Problem:
    """Random tensors of the positions that are held, in order, and their dense truth."""

    def __init__(self, queries, keys, mask, *, softcap=0.0, has_slopes=False, has_sinks=False):
        self.queries, self.keys, self.mask = queries, keys, mask
        self.rows, self.columns = (
            np.sort(np.concatenate([one.positions(rank) for rank in range(one.ranks)])) for one in (queries, keys)
        )
        generator = torch.Generator().manual_seed(len(self.rows))

        def numbers(heads, tokens):
            return torch.randn(2, heads, tokens, SIZE, generator=generator)

        self.q, self.dout = numbers(HEADS, len(self.rows)), numbers(HEADS, len(self.rows))
        self.k, self.v = numbers(GROUPS, len(self.columns)), numbers(GROUPS, len(self.columns))
        self.slopes = torch.rand(HEADS, generator=generator) / 4 if has_slopes else None
        self.sinks = torch.randn(HEADS, generator=generator) if has_sinks else None
        self.scores = Scores(SIZE**-0.5, softcap, self.slopes)
        held = (self.rows < queries.length)[:, None] & (self.columns < keys.length)
        allowed = mask.dense(self.rows, self.columns) & held
        distance = np.abs(self.rows[:, None] - self.columns)
        extra = {
            "softcap": softcap,
            "bias": None if self.slopes is None else -self.slopes.double().numpy()[:, None, None] * distance,
            "sinks": None if self.sinks is None else self.sinks.double().numpy(),
        }
        q, k, v, dout = (x.double().numpy() for x in (self.q, self.k, self.v, self.dout))
        self.out, self.lse = reference.attention(q, k, v, allowed, self.scores.scale, **extra)
        self.gradients = reference.backward(dout, q, k, v, allowed, self.scores.scale, **extra)
        self.terms = cancelling_terms(dout, q, k, v, allowed, self.scores.scale, **extra)

    def ring(self, rank, exchange, q, k, route, is_backward):
        positions = None
        if self.slopes is not None:
            positions = tuple(partial(_positions, one, device=q.device) for one in (self.queries, self.keys))
        route = "ring" if route == "pass-q" and is_backward else route
        schedule = make_schedule(self.queries, self.mask, rank, self.keys, route)
        spec = AttentionSpec(scale=self.scores.scale, mask=self.mask.spec, layout=self.queries.name, route=route)
        return ring.Ring(schedule, exchange, self.scores, spec, ring.num_head_groups(q, k, schedule), positions)

    def local(self, x, layout, order, rank):
        return x[:, :, np.searchsorted(order, layout.positions(rank))]

    def errors(self, route):
        def shards(rank):
            queries = (self.local(x, self.queries, self.rows, rank) for x in (self.q, self.dout))
            keys = (self.local(x, self.keys, self.columns, rank) for x in (self.k, self.v))
            return *queries, *keys

        def forward(rank, exchange):
            q, _, k, v = shards(rank)
            return ring.forward(self.ring(rank, exchange, q, k, route, False), q, k, v, self.sinks)

        partials, _ = on_ranks(self.queries.ranks, forward)

        def backward(rank, exchange):
            q, dout, k, v = shards(rank)
            return ring.backward(self.ring(rank, exchange, q, k, route, True), dout, q, k, v, *partials[rank])

        gradients, _ = on_ranks(self.queries.ranks, backward)
        results = [partial_[0] for partial_ in partials], *zip(*gradients, strict=True)
        layouts = self.queries, self.queries, self.keys, self.keys
        whole = [self.gathered(shards, layout) for shards, layout in zip(results, layouts, strict=True)]
        lse = self.gathered([partial_[1] for partial_ in partials], self.queries)
        np.testing.assert_allclose(lse, self.lse, rtol=0, atol=1e-5)
        return [
            relative(x, expected, terms) if terms.any() else float(np.abs(x).max(initial=0))  # nobody sees anything
            for x, expected, terms in zip(whole, (self.out, *self.gradients), self.terms[:4], strict=True)
        ]

    def gathered(self, shards, layout):
        order = np.concatenate([layout.positions(rank) for rank in range(layout.ranks)])
        return torch.cat(list(shards), 2).double().numpy()[:, :, np.argsort(order)]


@given(
    custom_layouts(),
    st.data(),
    masks,
    st.sampled_from(ROUTES),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
    st.booleans(),
)
@examples(100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_any_mask_on_any_runs(queries, data, mask, route, softcap, has_slopes, has_sinks):
    assume(exists(route, queries.ranks))
    keys = data.draw(st.one_of(st.just(queries), custom_layouts(queries.ranks)))
    problem = Problem(queries, keys, mask, softcap=softcap, has_slopes=has_slopes, has_sinks=has_sinks)
    assert max(problem.errors(route)) < FLOAT32_LIMIT


@pytest.mark.parametrize("route", ["ring", "all-gather", "pass-q"])
def test_a_chunk_of_new_queries_sees_a_long_cache(route):
    """As a prompt is read: new tokens split in zigzag, old ones in the runs that earlier chunks left."""
    new = CustomLayout.of([[(30, 4), (45, 3)], [(34, 4), (42, 3)], [(38, 4)]])
    cache = CustomLayout.of(
        [[(0, 5), (25, 5), (30, 4), (45, 3)], [(5, 5), (20, 5), (34, 4), (42, 3)], [(10, 10), (38, 4)]]
    )
    for mask in (rs.causal(), rs.sliding_window(9), rs.sliding_window(40)):
        assert max(Problem(new, cache, mask, has_sinks=True).errors(route)) < FLOAT32_LIMIT


@pytest.mark.parametrize("route", ["ring", "bidirectional", "double-ring:5", "pass-q"])
def test_a_document_that_skips_ranks_comes_from_its_owner(route):
    """Of 5 ranks the first shares a document with the fourth; the second and the third share others with the first."""
    layout = CustomLayout.of([[(0, 4), (8, 4), (20, 4)], [(4, 4), (16, 2)], [(12, 4), (18, 2)], [(24, 4)], [(28, 4)]])
    mask = rs.documents([8, 8, 4, 8, 4])
    hops = [hop for rank in range(5) for hop in make_schedule(layout, mask, rank, None, route).hops]
    assert any(send.ranges for hop in hops for send in hop.straight)
    assert max(Problem(layout, layout, mask).errors(route)) < FLOAT32_LIMIT
