"""Batches of random tokens and of packed documents, whose lengths are the same every time."""

import numpy as np
import torch
from torch import Tensor


def lengths_of(total: int, mean: int, seed: int = 0) -> list[int]:
    """Lengths around a mean, of so many tokens together."""
    lengths: list[int] = []
    generator = np.random.default_rng(seed)
    while sum(lengths) < total:
        lengths.append(int(generator.integers(max(1, mean // 4), 2 * mean - mean // 4)))
    lengths[-1] -= sum(lengths) - total
    return [length for length in lengths if length]


def batch_of(
    vocabulary: int, total: int, mean: int = 0, seed: int = 0
) -> dict[str, Tensor]:
    """A row of random tokens, which routers send to different experts; of documents if they have a mean length."""
    ids = torch.randint(vocabulary, (1, total))
    batch = {"input_ids": ids, "labels": ids}
    if mean:
        batch["position_ids"] = torch.cat(
            [torch.arange(length) for length in lengths_of(total, mean, seed)]
        )[None]
    return batch


def documents(total: int, mean: int, seed: int = 0) -> str:
    """The mask of such documents, as a text."""
    return "documents:" + ",".join(map(str, lengths_of(total, mean, seed)))
