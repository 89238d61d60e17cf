"""What examples a sampler deals out, one after the other."""

import tracemalloc
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from ringspan.torch.data import loader
from ringspan.torch.data.loader import RingSampler, shuffled


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("length", "replicas"), [(1, 1), (1, 4), (3, 7), (64, 4), (61, 4), (9001, 2)]
)
def test_the_order_is_that_of_torch(length, replicas, shuffle, drop_last):
    for rank in range(replicas):
        options = {
            "num_replicas": replicas,
            "rank": rank,
            "shuffle": shuffle,
            "seed": 5,
            "drop_last": drop_last,
        }
        ours, theirs = (
            RingSampler(range(length), **options),
            DistributedSampler(range(length), **options),
        )
        for epoch in range(3):
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs) and len(ours) == len(theirs)


class Claims:
    def __init__(self, length):
        self._length = length

    def __len__(self):
        return self._length


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_billion_examples_are_dealt_out_without_a_list_of_them(monkeypatch, shuffle):
    monkeypatch.setattr(torch, "randperm", None)  # which tracemalloc would not see
    data = Claims(1 << 30)
    tracemalloc.start()
    samplers = [
        RingSampler(data, num_replicas=4, rank=rank, shuffle=shuffle, seed=3)
        for rank in (0, 1, 1)
    ]
    first, second, like_it = (
        list(islice(iter(sampler), 20_000)) for sampler in samplers
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20
    assert second == like_it and len({*first, *second}) == 40_000
    assert min(second) >= 0 and max(second) < 1 << 30
    if shuffle:
        assert abs(np.mean(second) / (1 << 29) - 1) < 0.02 and all(
            b != a + 4 for a, b in pairwise(second)
        )
        resumed = RingSampler(data, num_replicas=4, rank=1, shuffle=True, seed=3)
        resumed.set_epoch(1)
        assert (
            list(islice(iter(resumed), 100))
            == list(islice(iter(samplers[1]), 100))
            != second[:100]
        )


def test_above_so_many_examples_replicas_still_share_them_out(monkeypatch):
    monkeypatch.setattr(loader, "_MOST_AT_ONCE", 100)
    samplers = [
        RingSampler(
            range(5003), num_replicas=3, rank=rank, shuffle=True, drop_last=True
        )
        for rank in range(3)
    ]
    dealt = [list(sampler) for sampler in samplers]
    assert [len(each) for each in dealt] == [5001 // 3] * 3
    assert len({number for each in dealt for number in each}) == 5001


def test_every_example_has_one_place():
    for length in [*range(1, 70), 255, 256, 257, 4099]:
        order = shuffled(np.arange(length), length, seed=length)
        assert sorted(order) == list(range(length))
        if length > 60:
            assert (
                order != shuffled(np.arange(length), length, seed=length + 1)
            ).sum() > length // 2
            assert np.abs(np.corrcoef(order, np.arange(length))[0, 1]) < 0.4
