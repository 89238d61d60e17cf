"""The order of sequences, and how those of a step are shared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.core.errors import ConfigError
from ringspan.core.sharing import busiest_over_mean, even_out
from ringspan.train.data.sequences import BatchOrder


def order(
    num_sequences: int = 50,
    seed: int = 1,
    batch: int = 2,
    accumulation: int = 3,
    replicate: int = 2,
) -> BatchOrder:
    return BatchOrder(
        num_sequences=num_sequences,
        seed=seed,
        batch_size=batch,
        accumulation_steps=accumulation,
        replicate=replicate,
    )


def row_of(batches: BatchOrder, steps: int) -> list[int]:
    return [
        i for step in range(steps) for i in batches.step_indices(step).ravel().tolist()
    ]


@given(
    st.integers(1, 30),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_epoch_takes_every_sequence_once(
    n: int, seed: int, batch: int, accumulation: int, replicate: int
):
    batches = order(n, seed, batch, accumulation, replicate)
    row = row_of(batches, 2 * n)
    assert len(row) == 2 * n * batches.global_batch_size
    for epoch in range(len(row) // n):
        assert sorted(row[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_the_row_depends_on_seed_and_epoch_not_on_the_batch():
    row = row_of(order(batch=12, accumulation=1, replicate=1), 9)
    for batch, accumulation, replicate in (
        (1, 12, 1),
        (1, 1, 12),
        (2, 3, 2),
        (3, 2, 2),
    ):
        assert (
            row_of(
                order(batch=batch, accumulation=accumulation, replicate=replicate), 9
            )
            == row
        )
    assert row_of(order(seed=2), 9) != row
    assert row[:50] != row[50:100]
    assert row[:50] != list(range(50))


def test_a_step_is_a_pure_function_of_its_number():
    in_order = [order().step_indices(step).tolist() for step in range(20)]
    batches = order()
    assert [
        batches.step_indices(step).tolist() for step in reversed(range(20))
    ] == in_order[::-1]


def test_the_row_is_the_same_on_every_machine_and_version():
    row = row_of(order(8, seed=0, batch=8, accumulation=1, replicate=1), 2)
    assert row == [3, 2, 1, 6, 0, 7, 4, 5, 7, 4, 5, 1, 6, 2, 0, 3]


def test_a_batch_larger_than_the_data_repeats_sequences():
    assert sorted(
        order(3, batch=4, accumulation=1, replicate=2).step_indices(0).ravel().tolist()
    ) in (sorted([0, 1, 2] * 2 + [a, b]) for a in range(3) for b in range(3) if a != b)


def test_an_order_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="num_sequences = 0"):
        order(0)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.data())
def test_shared_sequences_are_the_same_ones_with_evener_work(
    micro_steps, replicas, batch, data
):
    shape = (micro_steps, replicas, batch)
    count = micro_steps * replicas * batch
    indices = np.array(
        data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)),
        np.int64,
    ).reshape(shape)
    pairs = np.random.default_rng(0).lognormal(8, 2, 100).astype(np.int64)
    shared = np.take(indices, even_out(pairs[indices]))
    assert shared.shape == shape
    assert sorted(shared.ravel()) == sorted(indices.ravel())
    heaviest = np.sort(pairs[indices].ravel())[::-1].reshape(micro_steps, -1)
    # like beside like
    assert (np.sort(pairs[shared].reshape(micro_steps, -1))[:, ::-1] == heaviest).all()
    if batch == 1:  # sorted: no other arrangement has a smaller sum of largest ones
        assert (
            busiest_over_mean(pairs[shared])
            <= busiest_over_mean(pairs[indices]) + 1e-12
        )


def test_the_heavy_ones_of_a_step_work_at_the_same_time():
    indices = np.arange(8).reshape(2, 2, 2)
    work = np.array([100, 1, 90, 2, 50, 60, 3, 4]).reshape(2, 2, 2)
    shared = np.take(indices, even_out(work))
    # 100 + 50 beside 90 + 60
    assert [sorted(replica) for replica in shared[0].tolist()] == [
        [0, 4],
        [2, 5],
    ]
    assert [sorted(replica) for replica in shared[1].tolist()] == [[1, 7], [3, 6]]
    assert busiest_over_mean(work) == pytest.approx(
        (101 + 92 * 0 + 110) / ((101 + 92) / 2 + (110 + 7) / 2)
    )
    assert busiest_over_mean(work.ravel()[shared]) == 1.0
