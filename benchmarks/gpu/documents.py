"""Lengths of packed documents, the same every time."""

import numpy as np


def lengths_of(total: int, mean: int, seed: int = 0) -> list[int]:
    """Lengths around a mean, of so many tokens together."""
    lengths: list[int] = []
    generator = np.random.default_rng(seed)
    while sum(lengths) < total:
        lengths.append(int(generator.integers(max(1, mean // 4), 2 * mean - mean // 4)))
    lengths[-1] -= sum(lengths) - total
    return [length for length in lengths if length]


def documents(total: int, mean: int, seed: int = 0) -> str:
    """The mask of such documents, as a text."""
    return "documents:" + ",".join(map(str, lengths_of(total, mean, seed)))
