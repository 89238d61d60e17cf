"""Order of training sequences."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import ConfigError


@dataclass(frozen=True)
class BatchOrder:
    """Sequences of each step, micro-step and replica: a function of seed and step alone.

    Sequences, permuted again each epoch, form an endless row; step t (from 0) takes G = batch_size x accumulation_steps
    x replicate from shift + t x G. Only G matters, so a run resumes exactly on other replicas; `shift` is 0 until a run
    changes its G or skips data. A batch larger than the data repeats sequences.
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
        return self.batch_size * self.accumulation_steps * self.replicate

    def place(self, step: int) -> int:
        return self.shift + step * self.global_batch_size

    def step_indices(self, step: int) -> NDArray[np.int64]:
        """Return a step's sequences. int64, (accumulation_steps, replicate, batch_size)."""
        if step < 0:
            raise IndexError(f"step {step}: steps count from 0")
        places = self.place(step) + np.arange(self.global_batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(places, self.num_sequences)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = _permutation(self.num_sequences, self.seed, int(epoch))[offsets[here]]
        return indices.reshape(self.accumulation_steps, self.replicate, self.batch_size)


@lru_cache(maxsize=2)  # a step touches one epoch, or two at the seam
def _permutation(num_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # Sorted raw bits, not Generator.permutation: NumPy keeps the bit streams stable between versions, its methods not.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_sequences)
    permutation = np.argsort(keys, kind="stable")
    permutation.flags.writeable = False
    return permutation
