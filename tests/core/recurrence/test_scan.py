"""Spans, scans and halos as data: carried out here in numpy, against one token after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.errors import LayoutError
from ringspan.core.recurrence.spans import (
    begins_at,
    halo_loans,
    links_of,
    pieces_of,
    places_of,
    reach_back,
    scan_rounds,
)
from tests.core.recurrence.cases import sent_states, span_layouts, starts_of_rows


def carried_out(maps, states, links, chain_spans):
    """What each span takes, by messages alone; NaN where none comes. maps (M, R, K, K), states (M, R, K, V)."""
    maps, states = list(maps), list(states)
    taken = [np.full_like(states[0], np.nan) for _ in states]
    for messages in scan_rounds(links, chain_spans=chain_spans):
        before = list(maps), list(states)
        for source, target, has_map, composes, is_state in messages:
            assert source < target
            if is_state:
                assert source == target - 1
                assert not has_map
                taken[target] = before[1][source]
            if composes:
                states[target] = maps[target] @ before[1][source] + states[target]
                maps[target] = maps[target] @ (
                    before[0][source] if has_map else np.zeros_like(maps[target])
                )
    return taken


@given(st.data(), span_layouts, st.sampled_from([0, 1, 3, 100]))
def test_each_span_takes_the_state_behind_the_token_before_it(
    data, layout, chain_spans
):
    rows = data.draw(starts_of_rows(layout))
    places = places_of(layout)
    generator = np.random.default_rng(0)
    tokens = {
        p: generator.normal(size=(2, len(rows), 3, 3))
        for place in places
        for p in range(place.start, place.end)
    }
    links = links_of(places, rows)
    maps, states, expected = [], [], []
    state = np.zeros((len(rows), 3, 3))
    for place in places:
        expected.append(state.copy())
        own_map, own = np.stack([np.eye(3)] * len(rows)), np.zeros((len(rows), 3, 3))
        for position in range(place.start, place.end):
            for row, starts in enumerate(rows):
                if begins_at(position, starts):
                    own_map[row], own[row], state[row] = 0, 0, 0
            a, b = tokens[position]
            own_map, own, state = a @ own_map, a @ own + b, a @ state + b
        maps.append(own_map)
        states.append(own)
    for number, taken in enumerate(carried_out(maps, states, links, chain_spans)):
        for row, starts in enumerate(rows):
            if number and not begins_at(places[number].start, starts):
                np.testing.assert_allclose(
                    taken[row], expected[number][row], rtol=1e-8, atol=1e-8
                )
                assert links.takes[number]


@given(st.data(), span_layouts, st.sampled_from([0, 3, 100]))
def test_gradients_of_states_go_the_other_way_round(data, layout, chain_spans):
    """D_j = gamma_j + A_j^T D_{j+1}; a span takes D_{j+1} where the next one takes its state."""
    rows = data.draw(starts_of_rows(layout))
    places, generator = places_of(layout), np.random.default_rng(0)
    links = links_of(places, rows)
    maps = (
        generator.normal(size=(len(places), 1, 3, 3))
        * np.array(links.passes)[:, None, None, None]
    )
    gammas = (
        generator.normal(size=(len(places), 1, 3, 2))
        * np.array(links.takes)[:, None, None, None]
    )
    reverse = links.reverse
    taken = carried_out(
        maps.swapaxes(-1, -2)[::-1], gammas[::-1], reverse, chain_spans
    )[::-1]
    gradient = np.zeros((1, 3, 2))
    for number in range(len(places) - 1, -1, -1):
        if number + 1 < len(places) and links.takes[number + 1]:
            np.testing.assert_allclose(taken[number], gradient, rtol=1e-8, atol=1e-8)
        gradient = gammas[number] + maps[number].swapaxes(-1, -2) @ gradient


@given(st.data(), span_layouts)
def test_pieces_are_the_tokens_of_a_span_in_order(data, layout):
    (starts, *_) = data.draw(starts_of_rows(layout))
    for place in places_of(layout):
        pieces = pieces_of(place, starts)
        covered = [piece.offset + i for piece in pieces for i in range(piece.tokens)]
        assert covered == list(range(place.tokens))
        begun = {place.start + piece.offset for piece in pieces if piece.begins}
        assert begun == {start for start in starts if place.start <= start < place.end}


@given(st.data(), span_layouts, st.integers(1, 6))
def test_a_halo_reaches_back_as_far_as_its_document(data, layout, width):
    rows = data.draw(starts_of_rows(layout))
    places = places_of(layout)
    held = [[*range(place.start, place.end)] for place in places]
    halos = [[None] * width for _ in places]
    for source, offset, target, at, count in halo_loans(places, width, rows):
        assert halos[target][at : at + count] == [None] * count
        halos[target][at : at + count] = held[source][offset : offset + count]
    for number, place in enumerate(places):
        before = [position for span in held[:number] for position in span][-width:]
        wanted = 0
        for starts in rows:
            first = max(start for start in starts if start <= place.start)
            own = [position for position in before if position >= first]
            assert reach_back(places, number, width, starts) == len(own)
            wanted = max(wanted, len(own))
        assert (
            halos[number] == [None] * (width - wanted) + before[len(before) - wanted :]
        )


@pytest.mark.parametrize(
    ("ranks", "most_rounds"), [(1, 0), (2, 2), (4, 6), (8, 5), (32, 7)]
)
def test_many_spans_take_few_rounds(ranks, most_rounds):
    places = places_of(rs.Layout("zigzag", 64 * ranks, ranks))
    rounds = scan_rounds(links_of(places, ((0,),)))
    assert len(rounds) == most_rounds


def test_in_a_chain_one_state_per_span_travels():
    places = places_of(rs.Layout("zigzag", 64, 4))
    rounds = scan_rounds(links_of(places, ((0,),)))
    assert sent_states(rounds, [place.rank for place in places]) == len(places) - 1 == 6


def test_documents_that_begin_with_spans_send_nothing():
    places = places_of(rs.Layout("contiguous", 12, 4))
    starts = tuple(place.start for place in places)
    assert scan_rounds(links_of(places, (starts,))) == ()
    assert halo_loans(places, 3, (starts,)) == ()


def test_striped_tokens_are_refused():
    with pytest.raises(LayoutError, match="zigzag or contiguous"):
        places_of(rs.Layout("striped", 12, 3))
