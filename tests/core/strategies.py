"""Random masks, layouts and sizes for the property tests: small, odd, and rarely a multiple of anything."""

from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.names import LAYOUT_NAMES

lengths = st.integers(1, 41)
ranks = st.integers(1, 5)
layouts = st.builds(rs.Layout, st.sampled_from(LAYOUT_NAMES), lengths, ranks)

simple_masks = st.one_of(
    st.just(rs.causal()),
    st.just(rs.full()),
    st.builds(rs.sliding_window, st.integers(1, 20), global_tokens=st.integers(0, 6)),
    st.builds(rs.prefix_lm, st.integers(0, 20)),
    st.builds(rs.documents, st.lists(st.integers(1, 12), min_size=1, max_size=6)),
    st.builds(
        rs.documents,
        st.lists(st.integers(1, 12), min_size=1, max_size=6),
        is_causal=st.just(False),
    ),
    st.builds(
        rs.documents,
        st.lists(st.integers(1, 12), min_size=1, max_size=6),
        window=st.integers(1, 9),
    ),
    st.builds(
        rs.frames,
        st.lists(st.integers(1, 12), min_size=1, max_size=6),
        window=st.none() | st.integers(1, 4),
    ),
    st.builds(rs.chunked, st.integers(1, 15), length=st.integers(1, 50)),
)
masks = st.recursive(
    simple_masks,
    lambda inner: st.builds(
        lambda a, b, join: a & b if join else a | b, inner, inner, st.booleans()
    ),
    max_leaves=3,
)


@st.composite
def custom_layouts(draw, num_ranks=None, most_runs=7):
    """Runs of positions dealt out to ranks in any way: gaps, padding, unequal shares, ranks that hold nothing."""
    dealt = [[] for _ in range(draw(ranks) if num_ranks is None else num_ranks)]
    end = 0
    for gap, count in draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 9)),
            min_size=1,
            max_size=most_runs,
        )
    ):
        dealt[draw(st.integers(0, len(dealt) - 1))].append((end + gap, count))
        end += gap + count
    held = [draw(st.permutations(runs)) for runs in dealt]
    return CustomLayout.of(held, length=draw(st.integers(max(1, end - 5), end)))
