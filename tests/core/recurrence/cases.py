"""Random layouts of consecutive tokens, and documents that begin anywhere."""

from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.layout import Layout
from ringspan.core.recurrence.spans import Rounds
from tests.core.strategies import custom_layouts

span_layouts = st.one_of(
    st.builds(
        rs.Layout,
        st.sampled_from(["contiguous", "zigzag"]),
        st.integers(1, 41),
        st.integers(1, 7),
    ),
    custom_layouts(),
    custom_layouts(num_ranks=4, most_runs=23),
)


def end_of(layout: Layout) -> int:
    return max(
        span.start + span.count
        for rank in range(layout.ranks)
        for span in layout.spans(rank)
    )


@st.composite
def starts_of_rows(draw, layout):
    """Where documents begin in each sequence of a batch."""
    end = end_of(layout)
    rows = draw(st.integers(1, 3))
    return tuple(
        tuple(
            sorted(
                {
                    0,
                    *draw(
                        st.lists(
                            st.integers(0, end - 1),
                            max_size=draw(st.sampled_from([0, 2, 12])),
                        )
                    ),
                }
            )
        )
        for _ in range(rows)
    )


def sent_states(rounds: Rounds, owners: list[int]) -> int:
    """Count states, and maps of a state's size, that travel between different ranks."""
    messages = (message for each in rounds for message in each)
    return sum(
        1 + message.has_map
        for message in messages
        if owners[message.source] != owners[message.target]
    )
