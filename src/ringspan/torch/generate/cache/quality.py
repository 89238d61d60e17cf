"""Loss change on a text caused by a cache in fewer bits."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspan.core.errors import UnsupportedError


class CacheCost(NamedTuple):
    """Scores of one text over a cache in the model's precision and one in fewer bits."""

    loss: float
    """Mean negative log-probability of the scored tokens."""
    loss_then: float
    """Same loss over the other cache."""
    logits_error: float
    """Norm of the change of the last token's logits, by the norm of the logits."""
    cache_bytes: int
    """Bytes of this rank's share."""
    cache_bytes_then: int
    """Bytes of this rank's share of the other cache."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def perplexity_then(self) -> float:
        return math.exp(self.loss_then)


@torch.no_grad()
def cache_cost(model: Any, ids: Tensor, dtype: str, scored: int) -> CacheCost:
    """Read all but the last ``scored`` + 1 tokens of ids (B, L) into both caches, and score the last over each."""
    if ids.ndim != 2 or not 1 <= scored <= ids.shape[1] - 2:
        raise UnsupportedError(f"scored={scored} of {tuple(ids.shape)} tokens: at least one must be read, one scored")
    losses: list[float] = []
    last: list[Tensor] = []
    sizes: list[int] = []
    for kind in (None, dtype):
        cache = model.new_cache(kind)
        model(ids[:, : -scored - 1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = model(ids[:, -scored - 1 : -1], past_key_values=cache, use_cache=True).logits.float()
        losses.append(float(F.cross_entropy(logits.flatten(0, 1), ids[:, -scored:].flatten().to(logits.device))))
        last.append(logits[:, -1])
        sizes.append(cache.nbytes)
    error = float((last[1] - last[0]).norm() / last[0].norm())
    return CacheCost(losses[0], losses[1], error, sizes[0], sizes[1])
