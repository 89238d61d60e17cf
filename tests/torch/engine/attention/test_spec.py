"""The text of a spec: read back as it was written, and no part of a length."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core import names
from ringspan.core.codec import Sent
from ringspan.torch.engine.attention.spec import AttentionSpec, padding_of
from tests.core.strategies import masks
from tests.fuzz import examples

finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 1 << 40)


@examples(100)
@given(
    st.builds(
        AttentionSpec,
        scale=finite,
        softcap=finite,
        mask=st.one_of(masks, st.just(rs.documents([700, 1300], window=64))).map(
            lambda mask: mask.spec
        ),
        layout=st.sampled_from(names.LAYOUT_NAMES),
        padding=counts,
        key_padding=counts,
        route=st.sampled_from(["ring", "double-ring:4", "ulysses:2+all-gather"]),
        sent=st.builds(
            Sent,
            st.sampled_from(names.COMM_DTYPE_NAMES),
            st.sampled_from(names.GRADIENT_COMM_DTYPE_NAMES),
        ),
        kernel=st.sampled_from(names.KERNEL_NAMES),
        group=st.text(),
    )
)
def test_a_spec_is_read_back_from_its_text(spec):
    assert AttentionSpec.parse(str(spec)) == spec
    assert list(
        dict(part.split("=", 1) for part in str(spec).split(" ", len(fields(spec)) - 1))
    ) == [f.name for f in fields(spec)]


@pytest.mark.parametrize("layout", names.LAYOUT_NAMES)
@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_layouts_are_found_again_from_what_ranks_hold(layout, length):
    queries, keys = rs.Layout(layout, length, 3), rs.Layout(layout, 2 * length, 3)
    spec = AttentionSpec(
        scale=1.0,
        layout=layout,
        padding=padding_of(queries),
        key_padding=padding_of(keys),
    )
    assert spec.layouts(queries.tokens_per_rank, keys.tokens_per_rank, 3) == (
        queries,
        keys,
    )


def test_one_compiled_graph_serves_every_length():
    """Lengths in the text would make each of them another constant, and another graph."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda q: rs.ring_attention(q, q, q), fullgraph=True, backend=backend
    )
    for length in (16, 24, 32, 40):
        q = torch.randn(1, 2, length, 8)
        assert torch.equal(compiled(q), rs.ring_attention(q, q, q))
    assert len(graphs) == 2  # of one length, then of any
