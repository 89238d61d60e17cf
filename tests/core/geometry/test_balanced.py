"""Balanced layouts: what every one is, and what they are worth on documents as they come."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.errors import LayoutError
from ringspan.core.geometry.balanced import _Placing, balanced
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.geometry.pairs import pairs_before, stretches
from ringspan.core.schedule.schedule import make_schedule
from tests.core.strategies import custom_layouts, lengths, masks
from tests.fuzz import examples


@given(masks, lengths, st.integers(1, 9), st.integers(1, 8))
@examples(500)
def test_every_position_is_held_once_and_every_rank_holds_as_many(mask, length, ranks, chunk_tokens):
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
    """Allowed pairs whose query each rank holds."""
    regions = stretches(mask, layout.length).regions
    return np.array(
        [
            sum(
                int((pairs_before(regions, span.start + span.count) - pairs_before(regions, span.start)).sum())
                for span in layout.spans(rank)
                if span.start < layout.length
            )
            for rank in range(layout.ranks)
        ]
    )


def sent(layout, mask):
    return sum(make_schedule(layout, mask, rank, route="all-gather").sent_tokens for rank in range(layout.ranks))


def lognormal(total, seed=0):
    """Lengths of documents around 2,048 that add up to ``total``."""
    numbers, lengths = np.random.default_rng(seed), []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, max(16, int(numbers.lognormal(np.log(2048), 1.0)))))
    return lengths


@given(masks, lengths, st.integers(1, 6))
@examples(100)
def test_work_is_counted_as_the_schedule_counts_it(mask, length, ranks):
    layout = balanced(mask, length=length, ranks=ranks)
    counted = [make_schedule(layout, mask, rank).num_pairs for rank in range(ranks)]
    assert work(layout, mask).tolist() == counted


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("long", [0, 65_536])
def test_documents_as_they_come_are_balanced(ranks, long):
    total = 262_144
    mask = rs.documents(([long] if long else []) + lognormal(total - long))
    pairs = work(balanced(mask, length=total, ranks=ranks), mask)
    assert pairs.max() / pairs.mean() <= 1.03
    zigzag = work(rs.Layout("zigzag", total, ranks), mask)
    assert zigzag.max() / zigzag.mean() > 1.03  # what luck gives


def test_documents_that_fit_are_sent_nowhere():
    mask = rs.documents([300] * 64)
    layout = balanced(mask, length=300 * 64, ranks=8)
    assert sent(layout, mask) == 0
    assert set(work(layout, mask)) == {8 * 300 * 301 // 2}


def test_few_documents_are_cut():
    """Of 500 documents on 4 ranks, at most one for each rank is cut, and little of it is sent."""
    lengths = lognormal(1 << 20)
    mask = rs.documents(lengths)
    layout = balanced(mask, length=sum(lengths), ranks=4)
    zigzag = rs.Layout("zigzag", sum(lengths), 4)
    assert sent(layout, mask) <= sent(zigzag, mask) / 20


def test_thousands_of_documents_ask_rarely_whether_all_can_still_be_balanced(monkeypatch):
    """It takes as long as placing dozens of them, and most of these are placed as they come."""
    asked, missing = [], _Placing._missing
    monkeypatch.setattr(_Placing, "_missing", lambda *given: asked.append(1) or missing(*given))
    lengths = lognormal(1 << 22)
    layout = balanced(rs.documents(lengths), length=sum(lengths), ranks=16)
    pairs = work(layout, rs.documents(lengths))
    assert len(lengths) > 1000 and len(asked) < 20 and pairs.max() / pairs.mean() <= 1.03


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


def test_another_process_finds_the_same():
    script = (
        "import ringspan as rs\n"
        "mask = rs.documents([n % 97 + 1 for n in range(7, 7000, 131)])\n"
        "print(rs.balanced(mask, length=2600, ranks=6).spec)"
    )
    found = {subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(found) == 1


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(LayoutError, match="ranks of at least 1, got 0"):
        balanced(rs.causal(), length=8, ranks=0)
    with pytest.raises(LayoutError, match="length"):
        balanced(rs.causal(), length=8.5, ranks=2)
    with pytest.raises(LayoutError, match="mask"):
        balanced("causal", length=8, ranks=2)
