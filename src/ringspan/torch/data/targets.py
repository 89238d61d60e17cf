"""Targets of a rank's tokens: one for each token, or a list of them with their places.

B batch, T local tokens, R listed targets, S tokens of whole sequences.
"""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from ringspan.torch.data.padding import IGNORED
from ringspan.torch.engine.transport.collectives import Sum


class Targets(NamedTuple):
    """Labels (B, T), -100 without a target; or labels (1, R), any number of them for a token."""

    labels: Tensor
    places: Tensor | None = None
    """(R, 2 or 3): each listed target's local token, its index among all results, and its weight if any is not 1."""

    @property
    def weights(self) -> Tensor | None:
        """Times that each listed target counts (R,); None if each counts once."""
        return (
            None
            if self.places is None or self.places.shape[1] == 2
            else self.places[:, 2]
        )

    @property
    def times(self) -> Tensor:
        """Times that each target counts, flat: 0 without one."""
        weights = self.weights
        return (self.labels != IGNORED).flatten() if weights is None else weights

    def predicted_by(self, hidden: Tensor) -> Tensor:
        """Return the hidden states (B, T, C) or (1, R, C) that predict the targets."""
        return hidden if self.places is None else hidden[:, self.places[:, 0]]


def whole_results(
    local: Tensor, places: Tensor, length: int, group: dist.ProcessGroup
) -> Tensor:
    """Return all ranks' results (1, ``length``, ...) of listed targets, given the local ones (1, R, ...)."""
    whole = local.new_zeros(1, length, *local.shape[2:])
    return Sum.apply(whole.index_add(1, places[:, 1], local), [group])
