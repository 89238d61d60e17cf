"""Who makes which embeddings, and where they go."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspan.core.geometry.layout import Layout
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.mechanisms.media.kinds import kind_of
from ringspan.torch.mechanisms.media.towers import make_plan, share_out
from ringspan.torch.model.layers.decoder import inner_of
from ringspan.torch.model.view import view_of
from tests.torch.mechanisms.media.models import KINDS, Example, batch_of, build
from tests.torch.models import relative


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
    layout = Layout(
        draw(st.sampled_from(("zigzag", "striped", "contiguous"))),
        draw(st.integers(1, 40)),
        3,
    )
    batch = draw(st.integers(1, 3))
    flags = draw(
        st.lists(
            st.booleans(),
            min_size=batch * layout.length,
            max_size=batch * layout.length,
        )
    )
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
    sent = [
        (torch.arange(firsts[rank], firsts[rank + 1]))[plans[rank].sent]
        for rank in range(3)
    ]
    pieces = [
        each.split(plan.send_counts) for each, plan in zip(sent, plans, strict=True)
    ]
    whole = np.full((batch, layout.padded_length), -1)
    whole[places[:, 0], places[:, 1]] = np.arange(len(places))
    for rank in range(3):
        arrived = torch.cat([pieces[owner][rank] for owner in range(3)])
        assert [len(pieces[owner][rank]) for owner in range(3)] == plans[
            rank
        ].receive_counts
        local = whole[:, layout.positions(rank)]
        assert arrived[plans[rank].order].tolist() == local[local >= 0].tolist()


# Three images or windows each in an example of its own, and a video where the model takes some.
THREE: list[Example] = [[3, "i", 2], [1, "i", 4], [2, "i", 1]]
VIDEOS: list[Example] = [[3, "v", 2], [1, "v", 4]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_treats_each_unit_by_itself(kind):
    """So none of them needs a ring: a video is cut between any two frames."""
    dtype = (
        torch.float32
        if "llama4" in kind or "qwen3_5" in kind or "moe" in kind
        else torch.float64
    )
    model = build(kind, dtype=dtype).eval()
    seen = kind_of(view_of(model))
    assert seen is not None
    for modality, examples in zip(seen.modalities, (THREE, VIDEOS), strict=False):
        inputs, cut = batch_of(kind, examples, dtype=dtype), modality.cut
        inner = inner_of(model)
        method = (
            partial(seen.features, inner)
            if seen.features
            else getattr(inner, f"get_{modality.name}_features")
        )

        def rows(
            units: range, cut=cut, inputs=inputs, method=method
        ) -> list[torch.Tensor]:
            with torch.no_grad():
                output = method(**cut.take(inputs, units), return_dict=True)
            return cut.rows(output.pooler_output, inputs, units)

        count = len(cut.costs(inputs))
        assert count >= 3
        whole = torch.cat(rows(range(count)))
        alone = torch.cat(
            [row for unit in range(count) for row in rows(range(unit, unit + 1))]
        )
        assert relative(alone, whole) < (
            1e-5 if dtype == torch.float32 or "gemma" in kind else 1e-9
        )
