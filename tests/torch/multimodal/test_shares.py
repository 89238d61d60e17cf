"""Who makes which embeddings, and where they go."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspan.core.geometry.layout import Layout
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.multimodal.shares import make_plan, share_out


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 8))
def test_units_are_shared_out_in_order_and_evenly(costs, ranks):
    shares = share_out(costs, ranks)
    assert [unit for share in shares for unit in share] == list(range(len(costs)))
    work = [sum(costs[unit] for unit in share) for share in shares]
    assert max(work) <= sum(costs) / ranks + max(costs, default=0)


def test_equal_units_differ_by_one_at_most():
    assert sorted(len(share) for share in share_out([7] * 11, 4)) == [2, 3, 3, 3]


@st.composite
def problems(draw):
    layout = Layout(draw(st.sampled_from(("zigzag", "striped", "contiguous"))), draw(st.integers(1, 40)), 3)
    batch = draw(st.integers(1, 3))
    flags = draw(st.lists(st.booleans(), min_size=batch * layout.length, max_size=batch * layout.length))
    places = np.argwhere(np.array(flags).reshape(batch, layout.length))
    cuts = sorted(draw(st.tuples(*[st.integers(0, len(places))] * 2)))
    made = [cuts[0], cuts[1] - cuts[0], len(places) - cuts[1]]
    return layout, batch, places, made


@given(problems())
def test_every_embedding_comes_to_its_token(problem):
    """Each rank gets, in the order of its own tokens, what a scatter over the whole batch would put there."""
    layout, batch, places, made = problem
    plans = [make_plan(places, BatchLayout((layout,)), rank, made) for rank in range(3)]
    firsts = np.cumsum([0, *made])
    sent = [(torch.arange(firsts[rank], firsts[rank + 1]))[plans[rank].sent] for rank in range(3)]
    pieces = [each.split(plan.send_counts) for each, plan in zip(sent, plans, strict=True)]
    whole = np.full((batch, layout.padded_length), -1)
    whole[places[:, 0], places[:, 1]] = np.arange(len(places))
    for rank in range(3):
        arrived = torch.cat([pieces[owner][rank] for owner in range(3)])
        assert [len(pieces[owner][rank]) for owner in range(3)] == plans[rank].receive_counts
        local = whole[:, layout.positions(rank)]
        assert arrived[plans[rank].order].tolist() == local[local >= 0].tolist()
