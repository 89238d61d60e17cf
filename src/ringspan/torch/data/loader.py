"""Distribution of examples: the same ones to the ranks of a ring, different ones to replicas."""

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ringspan.core.errors import ConfigError
from ringspan.torch.runtime.foreign_mesh import ring_mesh

_MOST_AT_ONCE: Final = 1 << 24  # examples whose whole order is drawn, in 128 MiB
_PLACES: Final = 1 << 12  # places of an order that are looked up together
_ROUNDS: Final = 6
# The finaliser of SplitMix64 (Steele et al. 2014): shifts and odd factors after which every bit depends on every other.
_MIXING: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


class RingSampler(DistributedSampler[Any]):
    """DistributedSampler over replicas; passes are epochs. Above 2**24 examples the order is ``shuffled``'s."""

    def __iter__(self) -> Iterator[Any]:
        order = self._examples(self.seed + self.epoch)
        self.set_epoch(self.epoch + 1)  # at once: a loop may leave its epoch early
        return order

    def _examples(self, seed: int) -> Iterator[int]:
        """Yield every R-th example of the order, which begins again until all R replicas have equal numbers."""
        num_examples = len(cast(Sized, self.dataset))
        drawn = None
        if self.shuffle and num_examples <= _MOST_AT_ONCE:
            drawn = torch.randperm(
                num_examples, generator=torch.Generator().manual_seed(seed)
            ).numpy()
        for first in range(0, self.num_samples, _PLACES):
            numbers = np.arange(first, min(first + _PLACES, self.num_samples))
            places = (self.rank + self.num_replicas * numbers) % num_examples
            if self.shuffle:
                places = (
                    shuffled(places, num_examples, seed)
                    if drawn is None
                    else drawn[places]
                )
            yield from places.tolist()


def sampler(
    dataset: Dataset[Any],
    mesh: DeviceMesh,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
) -> RingSampler:
    """Return the sampler of this rank's replica, equal on all ranks of its ring.

    Args:
        dataset: anything with a length, the same on every rank.
        mesh: as ``parallelize`` takes.
        shuffle: take another order in each epoch, from the seed.
        seed: the same on every rank.
        drop_last: leave out an uneven rest; otherwise some first examples are seen twice.
    """
    replicas = ring_mesh(mesh).get_group("replicate")
    return RingSampler(
        dataset,
        num_replicas=replicas.size(),
        rank=replicas.rank(),
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


def loader(
    dataset: Dataset[Any], mesh: DeviceMesh, *, batch_size: int | None = 1, shuffle: bool = False, seed: int = 0,
    drop_last: bool = False, **options: Any,
) -> DataLoader[Any]:  # fmt: skip
    """Return a DataLoader whose batches are equal on a ring and differ between replicas.

    So do the random draws of its workers.

    Args:
        dataset: with a length, see ``sampler``; or iterable: replica r of R takes examples r, r + R, ... until one
            lacks its example.
        mesh: as ``parallelize`` takes.
        batch_size: examples per replica; None if each example is a batch already.
        shuffle: see ``sampler``; an iterable data set has its own order.
        seed: of the order, and of what workers draw.
        drop_last: leave out an uneven rest, and a batch that is not full.
        options: further ones of ``DataLoader``.

    Raises:
        ConfigError: an option that the mesh decides, or shuffling what is iterable.
    """
    for name in ("sampler", "batch_sampler", "generator"):
        if options.get(name) is not None:
            raise ConfigError(
                f"rs.loader makes its own {name}; use torch's DataLoader with rs.sampler(dataset, mesh)"
            )
    replicas = ring_mesh(mesh).get_group("replicate")
    options["generator"] = torch.Generator().manual_seed(
        seed * replicas.size() + replicas.rank()
    )
    options |= {"batch_size": batch_size, "drop_last": drop_last}
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ConfigError(
                "shuffle=True: an iterable data set has its own order; shuffle it where it is made"
            )
        return DataLoader(_Dealt(dataset, replicas.size(), replicas.rank()), **options)
    return DataLoader(
        dataset,
        sampler=sampler(dataset, mesh, shuffle=shuffle, seed=seed, drop_last=drop_last),
        **options,
    )


class _Dealt(IterableDataset[Any]):
    def __init__(
        self, dataset: IterableDataset[Any], replicas: int, replica: int
    ) -> None:
        self._dataset, self._replicas, self._replica = dataset, replicas, replica

    def __iter__(self) -> Iterator[Any]:
        examples = iter(self._dataset)
        while len(round_ := list(islice(examples, self._replicas))) == self._replicas:
            yield round_[self._replica]


def shuffled(
    places: NDArray[np.int64], num_examples: int, seed: int
) -> NDArray[np.int64]:
    """Return the examples at some places of a seed's permutation of ``range(num_examples)``.

    A Feistel network permutes a range of at most 4 numbers per example. A result outside of the examples is permuted
    again until it is inside (Black and Rogaway 2002).
    """
    half = max(1, (num_examples - 1).bit_length() + 1 >> 1)
    # Raw bits are the same in every version of NumPy.
    keys = np.random.PCG64(seed % (1 << 64)).random_raw(_ROUNDS)
    found = np.empty(len(places), np.uint64)
    open_, numbers = np.arange(len(places)), places.astype(np.uint64)
    while len(open_):
        numbers = _permuted(numbers, half, keys)
        found[open_] = numbers
        outside = numbers >= num_examples
        open_, numbers = open_[outside], numbers[outside]
    return found.astype(np.int64)


def _permuted(
    numbers: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permute numbers of ``2 * half`` bits: each round mixes one half into the other."""
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> bits, numbers & low
    for key in keys:
        mixed = right + key
        for shift, factor in _MIXING:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        left, right = right, left ^ (mixed & low)
    return left << bits | right
