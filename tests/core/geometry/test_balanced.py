"""Balanced layouts: what every one is, and what they are worth on documents as they come."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from benchmarks.layouts import LAYOUTS, code, counted, drawn, lognormal, one_long
from ringspan.core.errors import LayoutError
from ringspan.core.geometry.balanced import Placing, balanced, cut_by_work, level
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.geometry.pairs import pairs_before, stretches
from ringspan.core.schedule.schedule import make_schedule
from tests.cases import long
from tests.core.strategies import custom_layouts, lengths, masks
from tests.fuzz import examples


@given(masks, lengths, st.integers(1, 9), st.integers(1, 8))
@examples(200)
def test_each_position_is_held_once_and_ranks_hold_equally_many(
    mask, length, ranks, chunk_tokens
):
    layout = balanced(mask, length=length, ranks=ranks, chunk_tokens=chunk_tokens)
    each = -(-length // ranks)
    assert [layout.tokens_of(rank) for rank in range(ranks)] == [each] * ranks
    assert layout.length == length
    assert sorted(layout.permutation) == list(range(each * ranks))


@given(custom_layouts())
@examples(100)
def test_a_layout_reads_back_from_its_text(layout):
    assert CustomLayout.parse(layout.spec) == layout


def work(layout, mask):
    regions = stretches(mask, layout.length).regions
    return np.array(
        [
            sum(
                int(
                    (
                        pairs_before(regions, span.start + span.count)
                        - pairs_before(regions, span.start)
                    ).sum()
                )
                for span in layout.spans(rank)
                if span.start < layout.length
            )
            for rank in range(layout.ranks)
        ]
    )


def sent(layout, mask):
    return sum(
        make_schedule(layout, mask, rank, route="all-gather").sent_tokens
        for rank in range(layout.ranks)
    )


@given(masks, lengths, st.integers(1, 6))
@examples(100)
def test_work_is_counted_as_the_schedule_counts_it(mask, length, ranks):
    layout = balanced(mask, length=length, ranks=ranks)
    counted = [make_schedule(layout, mask, rank).num_pairs for rank in range(ranks)]
    assert work(layout, mask).tolist() == counted


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.integers(2, 5),
    st.sampled_from(sorted(LAYOUTS)),
)
@examples(100)
def test_the_benchmark_counts_pairs_and_what_others_need(documents, ranks, name):
    layout = LAYOUTS[name](documents, ranks)
    owner, seen = (
        np.empty(layout.padded_length, int),
        np.concatenate([np.arange(n) + 1 for n in documents]),
    )
    for rank in range(ranks):
        owner[layout.positions(rank)] = rank
    stops = np.repeat(np.cumsum(documents), documents)
    work = np.bincount(owner[: len(seen)], weights=seen, minlength=ranks)
    needed = sum(
        len({*owner[token:stop].tolist()}) - 1
        for token, stop in enumerate(stops.tolist())
    )
    assert counted(layout, documents) == (
        pytest.approx(work.max() / work.mean()),
        needed,
    )


@pytest.mark.parametrize("ranks", [4, 16, 64])
@pytest.mark.parametrize("length", [65_536, 262_144, *long(1_048_576)])
@pytest.mark.parametrize("documents_of", [lognormal, code, one_long])
def test_balanced_documents_send_less_than_zigzag(documents_of, length, ranks):
    """From 1,024 tokens per rank on."""
    documents = documents_of(length)
    work_over_mean, tokens = counted(LAYOUTS["balanced"](documents, ranks), documents)
    _, by_zigzag = counted(LAYOUTS["zigzag per document"](documents, ranks), documents)
    assert work_over_mean <= 1.03
    assert tokens <= by_zigzag / (5 if documents_of is lognormal else 1)


@pytest.mark.parametrize("sigma", [1.0, *long(0.5, 1.5)])
@pytest.mark.parametrize("seed", [1, 2, *long(3, 4, 5, 6)])
@pytest.mark.parametrize("ranks", [24, 64])
def test_other_documents_are_balanced_as_well(ranks, seed, sigma):
    documents = drawn(262_144, seed, sigma)
    assert counted(LAYOUTS["balanced"](documents, ranks), documents)[0] <= 1.03


def test_what_the_first_leeway_leaves_uneven_is_placed_again():
    documents = drawn(1 << 20, 2, 1.0)
    mask = rs.documents(documents)
    first = Placing(stretches(mask, 1 << 20), 1 << 20, 64, 128, 1.0)
    first.place_all()
    assert first.most_above > 0.03 * first.mean
    assert counted(first.layout(), documents)[0] == pytest.approx(
        1 + first.most_above / first.mean
    )
    assert counted(balanced(mask, length=1 << 20, ranks=64), documents)[0] <= 1.03


def test_work_continues_over_documents_that_ranks_share():
    """Three ranks, of which the first and the last share no document."""
    documents = [6000, 6000, 1000]
    some = stretches(rs.documents(documents), sum(documents))
    pairs = some.pairs.tolist()
    halves = np.array([3000, 3000])
    cuts = [
        cut_by_work(
            some,
            document,
            np.array([document, document + 1]),
            halves,
            np.full(2, pairs[document] / 2),
            0.0,
        )
        for document in range(2)
    ]
    work = np.zeros(3)
    for cut in cuts:
        work[cut.ranks] += cut.pairs
    work[0] += pairs[2]
    mean = work.sum() / 3
    assert work.max() > 1.3 * mean  # the one in the middle
    lacking = mean - work
    level(some, cuts, lacking, 0.005 * mean, 0.0)
    assert np.abs(lacking).max() < 0.01 * mean
    # Nothing but the chunks has changed, and work is counted as they are.
    assert [cut.counts.tolist() for cut in cuts] == [[3000, 3000]] * 2
    work = np.array([0.0, 0.0, 0.0])
    for cut in cuts:
        for rank, start, count in cut.chunks:
            edges = some.before(cut.stretch, np.array([start, start + count]))
            work[rank] += edges[1] - edges[0]
    work[0] += pairs[2]
    np.testing.assert_allclose(mean - work, lacking)


def test_more_work_than_all_lack_is_shared_evenly():
    """A rank with much room takes no more of what is too much for all than the others do."""
    documents = code(65_536)
    first = Placing(stretches(rs.documents(documents), 65_536), 65_536, 64, 128, 1.0)
    _, counts, share = first._shared(
        900, 1000.0, 0.0, np.array([500.0] + [1.0] * 63), np.arange(64)
    )
    assert counts.sum() == 900
    np.testing.assert_allclose(share - np.array([500.0] + [1.0] * 63), 437 / 64)


def test_documents_that_fit_are_sent_nowhere():
    mask = rs.documents([300] * 64)
    layout = balanced(mask, length=300 * 64, ranks=8)
    assert sent(layout, mask) == 0
    assert set(work(layout, mask)) == {8 * 300 * 301 // 2}


def test_few_documents_are_cut():
    """Of 500 documents on 4 ranks, at most one for each rank is cut, and little of it is sent."""
    documents = lognormal(1 << 20)
    (_, tokens), (_, by_zigzag) = (
        counted(LAYOUTS[name](documents, 4), documents)
        for name in ("balanced", "zigzag")
    )
    assert tokens <= by_zigzag / 20


def test_balancing_thousands_of_documents_checks_rarely(monkeypatch):
    """It takes as long as placing dozens of them, and most of these are placed as they come."""
    asked, missing = [], Placing._missing
    monkeypatch.setattr(
        Placing, "_missing", lambda *given: asked.append(1) or missing(*given)
    )
    lengths = lognormal(1 << 22)
    layout = balanced(rs.documents(lengths), length=sum(lengths), ranks=16)
    pairs = work(layout, rs.documents(lengths))
    assert (
        len(lengths) > 1000 and len(asked) < 20 and pairs.max() / pairs.mean() <= 1.03
    )


@pytest.mark.parametrize("mask", [rs.causal(), rs.full(), rs.prefix_lm(700)])
def test_one_long_sequence_is_balanced(mask):
    length = 5003
    pairs = work(balanced(mask, length=length, ranks=4), mask)
    assert pairs.max() / pairs.mean() <= 1.02


def test_a_window_is_cut_into_one_chunk_a_rank():
    mask = rs.sliding_window(256)
    layout = balanced(mask, length=8192, ranks=4)
    assert [len(layout.spans(rank)) for rank in range(4)] == [1] * 4
    assert sent(layout, mask) == 3 * 255


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(LayoutError, match="ranks must be at least 1, got 0"):
        balanced(rs.causal(), length=8, ranks=0)
    with pytest.raises(LayoutError, match="length"):
        balanced(rs.causal(), length=8.5, ranks=2)
    with pytest.raises(LayoutError, match="mask"):
        balanced("causal", length=8, ranks=2)
