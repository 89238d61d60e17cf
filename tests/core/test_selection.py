"""Costs of an index against counts of every query: pairs that are scored and chosen, tokens that are exchanged."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import BATCH_LAYOUT_NAMES
from ringspan.core.selection import (
    exchanged,
    scored_and_chosen,
    scored_and_chosen_causally,
    seen_in,
)
from tests.fuzz import examples

LENGTHS = st.lists(st.integers(1, 24), min_size=1, max_size=4)


@given(
    lengths=LENGTHS,
    layout=st.sampled_from(BATCH_LAYOUT_NAMES),
    ranks=st.integers(1, 5),
    topk=st.integers(1, 20),
    size=st.integers(1, 5),
)
@examples(60)
def test_costs_of_a_choice_are_those_of_its_queries(lengths, layout, ranks, topk, size):
    length = sum(lengths)
    split = batch_layout(layout, length, ranks, lengths)
    for mask in (rs.causal(), rs.documents(lengths)):
        real = Mask.parse(mask.spec).dense(np.arange(length), np.arange(length))
        held = [
            [p for p in split.positions(rank) if p < length]
            for rank in range(split.ranks)
        ]
        for rank, positions in enumerate(held):
            counts = [int(real[p].sum()) // size for p in positions]
            expected = sum(counts), sum(min(topk, count) for count in counts)
            found = scored_and_chosen(
                seen_in(mask, length)(split.positions(rank)), topk, size
            )
            assert found == expected
            if mask == rs.causal() and all(
                span.step == 1 for span in split.spans(rank)
            ):
                assert (
                    scored_and_chosen_causally(split.spans(rank), length, topk, size)
                    == expected
                )
            needed = {k for q in positions for k in np.flatnonzero(real[q])}
            received = {
                owner: len(needed & {*theirs}) for owner, theirs in enumerate(held)
            }
            tokens = exchanged(split, mask, rank)
            assert dict(tokens.received) == {
                owner: count for owner, count in received.items() if count
            }
            for peer, count in tokens.sent:
                assert dict(exchanged(split, mask, peer).received)[rank] == count
