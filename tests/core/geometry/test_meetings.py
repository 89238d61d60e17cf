"""Where stripes meet regions, from the few cells in which they do alike: the same as of every pair of ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringspan.core.geometry.meetings import stripe_cells, stripe_hulls
from ringspan.core.geometry.tile import meet
from tests.core.strategies import masks
from tests.fuzz import examples


@given(masks, st.integers(2, 9), st.integers(1, 9), st.integers(1, 9))
@examples(100)
def test_cells_and_hulls_are_those_of_every_pair_of_stripes(mask, step, q_count, k_count):
    regions = mask.table(step * q_count, step * k_count)
    a, b = np.mgrid[:step, :step]
    met = meet(a[..., None], q_count, b[..., None], k_count, step, regions.T[:, None, None])
    is_met = met[1] > met[0]
    cells = stripe_cells(step, q_count, k_count, regions)
    for weights, expected in ((cells.met[1] - cells.met[0], met[1] - met[0]), (cells.met[5] % 97, met[5] % 97)):
        assert np.array_equal(cells.summed(weights, step), (expected * is_met).sum((1, 2)))
    hulls = stripe_hulls(a.ravel(), b.ravel(), step, q_count, k_count, regions).reshape(2, step, step)
    seen = is_met.any(-1)
    assert np.array_equal(hulls.sum(0) < 0, seen)
    bounds = [np.where(is_met, of, k_count).min(-1, initial=k_count) for of in (met[2], -met[3])]
    assert np.array_equal(hulls[:, seen], np.stack(bounds)[:, seen])
    for query in range(step):
        alone = stripe_cells(step, q_count, k_count, regions, query)
        first, stop = alone.keys_of(query)
        assert np.array_equal((stop - first).clip(0).sum(), is_met[query].sum())
