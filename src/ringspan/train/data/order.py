"""The order of training sequences: a function of the seed and the step."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import ConfigError


@dataclass(frozen=True)
class BatchOrder:
    """The sequences of each step, micro-step and replica: a function of the seed and the step alone.

    The sequences, permuted anew in each epoch, form one endless row; step t (from 0) takes the next G of it, where G =
    batch_size x accumulation_steps x replicate. Only G matters, not its factors, so a run resumes exactly on another
    number of replicas. A batch larger than the data repeats sequences. A run that changed its G, or skipped data, has a
    `shift`: step t starts at shift + t x G.

    Raises:
        ConfigError: a number below one.
    """

    num_sequences: int
    seed: int
    batch_size: int
    accumulation_steps: int
    replicate: int
    shift: int = 0

    def __post_init__(self) -> None:
        for name in ("num_sequences", "batch_size", "accumulation_steps", "replicate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: an order of batches needs at least one")

    @property
    def global_batch_size(self) -> int:
        """Return the sequences per step over all replicas and micro-steps."""
        return self.batch_size * self.accumulation_steps * self.replicate

    def place(self, step: int) -> int:
        """Return the number of sequences before a step (from 0): the position in the data."""
        return self.shift + step * self.global_batch_size

    def step_indices(self, step: int) -> NDArray[np.int64]:
        """Return the sequences of a step. int64, (accumulation_steps, replicate, batch_size).

        Raises:
            IndexError: a step below 0.
        """
        if step < 0:
            raise IndexError(f"step {step}: steps count from 0")
        places = self.place(step) + np.arange(self.global_batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(places, self.num_sequences)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = _permutation(self.num_sequences, self.seed, int(epoch))[offsets[here]]
        return indices.reshape(self.accumulation_steps, self.replicate, self.batch_size)


def even_out(work: NDArray[np.int64]) -> NDArray[np.int64]:
    """Deal a step's sequences so that replicas have similar work in each micro-step, which they end together.

    Sequences of similar work share a micro-step; there each goes, heaviest first, to the least loaded replica with
    room. Input and result have shape (accumulation_steps, replicate, batch_size).
    """
    micro_steps, replicas, most = work.shape
    heaviest_first = np.argsort(-work, axis=None, kind="stable")
    shared = np.empty_like(work)
    for micro, places in enumerate(heaviest_first.reshape(micro_steps, -1)):
        loads, counts = np.zeros(replicas, np.int64), np.zeros(replicas, np.int64)
        for place in places:
            replica = int(np.argmin(np.where(counts < most, loads, np.iinfo(np.int64).max)))
            shared[micro, replica, counts[replica]] = place
            loads[replica] += work.flat[place]
            counts[replica] += 1
    return shared


def busiest_over_mean(work: NDArray[np.int64]) -> float:
    """Divide the work of the busiest replica, summed over micro-steps, by the same for evenly shared work.

    Work of each sequence, shape (..., accumulation_steps, replicate, batch_size).
    """
    loads = work.sum(-1)
    return float(loads.max(-1).sum() / max(1e-30, loads.mean(-1).sum()))


def worth_of_sharing(came: NDArray[np.int64], places: NDArray[np.int64]) -> tuple[float, float, float]:
    """Return the share of sequences that ``even_out`` moved, and ``busiest_over_mean`` with and without it.

    Work before and after ``even_out``; both (steps, accumulation_steps, replicate, batch_size).
    """
    shared = np.stack([np.take(work, place) for work, place in zip(came, places, strict=True)])
    moved = float(np.mean(places.reshape(len(places), -1) != np.arange(came[0].size)))
    return moved, busiest_over_mean(shared), busiest_over_mean(came)


@lru_cache(maxsize=2)  # a step touches one epoch, or two at the seam
def _permutation(num_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # Sorted raw bits, not Generator.permutation: NumPy keeps the bit streams stable between versions, its methods not.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_sequences)
    permutation = np.argsort(keys, kind="stable")
    permutation.flags.writeable = False
    return permutation
