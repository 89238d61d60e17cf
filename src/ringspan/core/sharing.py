"""Sequences of a step dealt to replicas, which end it together, with similar work."""

import numpy as np
from numpy.typing import NDArray


def even_out(work: NDArray[np.int64]) -> NDArray[np.int64]:
    """Deal sequences (accumulation_steps, replicate, batch_size) so that replicas' work is similar in each step."""
    micro_steps, replicas, most = work.shape
    heaviest_first = np.argsort(-work, axis=None, kind="stable")
    shared = np.empty_like(work)
    for micro, places in enumerate(heaviest_first.reshape(micro_steps, -1)):
        loads, counts = np.zeros(replicas, np.int64), np.zeros(replicas, np.int64)
        for place in places:
            replica = int(
                np.argmin(np.where(counts < most, loads, np.iinfo(np.int64).max))
            )
            shared[micro, replica, counts[replica]] = place
            loads[replica] += work.flat[place]
            counts[replica] += 1
    return shared


def busiest_over_mean(work: NDArray[np.int64]) -> float:
    """Divide the busiest replica's work by the mean; work (..., accumulation_steps, replicate, batch_size)."""
    loads = work.sum(-1)
    return float(loads.max(-1).sum() / max(1e-30, loads.mean(-1).sum()))


def worth_of_sharing(
    came: NDArray[np.int64], places: NDArray[np.int64]
) -> tuple[float, float, float]:
    """Return the share of sequences that ``even_out`` moved, and ``busiest_over_mean`` with and without it."""
    # Work before and after ``even_out``; both (steps, accumulation_steps, replicate, batch_size).
    shared = np.stack(
        [np.take(work, place) for work, place in zip(came, places, strict=True)]
    )
    moved = np.not_equal(
        places.reshape(len(places), -1), np.arange(came.size // len(came))
    )
    return (
        float(np.count_nonzero(moved)) / moved.size,
        busiest_over_mean(shared),
        busiest_over_mean(came),
    )
