"""The ring loop over layouts of any runs: unequal shares, ranks that hold nothing, queries and keys dealt out apart."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.schedule.schedule import make_schedule
from ringspan.torch.engine.attention import ring
from ringspan.torch.engine.attention.part import Ring, num_head_groups
from ringspan.torch.engine.attention.prepared import _positions
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.kernels.contract import Scores
from tests.core.geometry.test_custom_layout import held
from tests.core.schedule.test_schedule import exists
from tests.core.strategies import custom_layouts, masks
from tests.fuzz import examples
from tests.torch.engine.attention.test_ring import (
    FLOAT32_LIMIT,
    Problem,
    groups_of_heads,
)

__all__ = ["groups_of_heads"]  # a fixture for every test here too
ROUTES = ["ring", "bidirectional", "double-ring:2", "all-gather", "pass-q"]


class Held(NamedTuple):
    """A mask of what somebody holds."""

    mask: rs.Mask
    queries: CustomLayout
    keys: CustomLayout

    def dense(self, rows, columns):
        is_held = np.isin(rows, held(self.queries))[:, None] & np.isin(
            columns, held(self.keys)
        )
        return self.mask.dense(rows, columns) & is_held


class Custom(Problem):
    """A problem of the positions that are held."""

    def __init__(self, queries, keys, mask, **scores):
        shape = {"batch": 2, "heads": 4, "groups": 2, "size": 8}
        super().__init__(
            queries.length,
            Held(mask, queries, keys),
            keys=keys.length,
            **shape,
            **scores,
        )
        self.lse[:, :, ~np.isin(np.arange(queries.length), held(queries))] = -np.inf

    def on_ring(self, route):
        mask, queries, keys = self.mask
        spec = AttentionSpec(
            scale=self.scale, mask=mask.spec, layout=queries.name, route=route
        )
        positions = tuple(
            partial(_positions, one, device=self.q.device) for one in (queries, keys)
        )

        def passed(rank, exchange, q, k, is_backward):
            way = "ring" if route == "pass-q" and is_backward else route
            schedule = make_schedule(queries, mask, rank, keys, way)
            scores = Scores(self.scale, self.softcap, self.slopes)
            of_scores = None if self.slopes is None else positions
            mine = Ring(
                schedule,
                exchange,
                scores,
                spec,
                num_head_groups(q, k, schedule),
                of_scores,
            )
            return partial(ring.backward if is_backward else ring.forward, mine)

        return self.passes(queries, keys, passed)


@given(
    custom_layouts(),
    st.data(),
    masks,
    st.sampled_from(ROUTES),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
    st.booleans(),
)
@examples(
    100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
def test_any_mask_on_any_runs(
    queries, data, mask, route, softcap, has_slopes, has_sinks
):
    assume(exists(route, queries.ranks))
    keys = data.draw(st.one_of(st.just(queries), custom_layouts(queries.ranks)))
    problem = Custom(
        queries, keys, mask, softcap=softcap, has_slopes=has_slopes, has_sinks=has_sinks
    )
    assert max(problem.errors(route)) < FLOAT32_LIMIT


@pytest.mark.parametrize("route", ["ring", "all-gather", "pass-q"])
def test_a_chunk_of_new_queries_sees_a_long_cache(route):
    """As a prompt is read: new tokens split in zigzag, old ones in the runs that earlier chunks left."""
    new = CustomLayout.of([[(30, 4), (45, 3)], [(34, 4), (42, 3)], [(38, 4)]])
    cache = CustomLayout.of(
        [
            [(0, 5), (25, 5), (30, 4), (45, 3)],
            [(5, 5), (20, 5), (34, 4), (42, 3)],
            [(10, 10), (38, 4)],
        ]
    )
    for mask in (rs.causal(), rs.sliding_window(9), rs.sliding_window(40)):
        assert (
            max(Custom(new, cache, mask, has_sinks=True).errors(route)) < FLOAT32_LIMIT
        )


@pytest.mark.parametrize("route", ["ring", "bidirectional", "double-ring:5", "pass-q"])
def test_a_document_that_skips_ranks_comes_from_its_owner(route):
    """Of 5 ranks the first shares a document with the fourth; the second and the third share others with the first."""
    layout = CustomLayout.of(
        [
            [(0, 4), (8, 4), (20, 4)],
            [(4, 4), (16, 2)],
            [(12, 4), (18, 2)],
            [(24, 4)],
            [(28, 4)],
        ]
    )
    mask = rs.documents([8, 8, 4, 8, 4])
    hops = [
        hop
        for rank in range(5)
        for hop in make_schedule(layout, mask, rank, None, route).hops
    ]
    assert any(send.ranges for hop in hops for send in hop.straight)
    assert max(Custom(layout, layout, mask).errors(route)) < FLOAT32_LIMIT
