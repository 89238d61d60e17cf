"""Muon (Jordan et al. 2024) as ``torch.optim`` has it, but in float32, and on shards that are gathered once a step.

On a CPU without instructions for bfloat16, whose products are slow there, torch's takes longer than forward and
backward of a small model. Of weights that FSDP shards it gathers each operand of each of its products.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Of the quintic that brings all singular values near one."""


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal; for matrices."""

    def __init__(
        self, weights: Iterable[torch.Tensor], lr: float, momentum: float = 0.95
    ) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step of all matrices that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.add_(
                        self._update(weight, group["momentum"]), alpha=-group["lr"]
                    )

    def _update(self, weight: torch.Tensor, momentum: float) -> torch.Tensor:
        average = self.state[weight].setdefault(
            "momentum_buffer", torch.zeros_like(weight)
        )
        average.lerp_(weight.grad, 1 - momentum)
        update = weight.grad.lerp(average, momentum)
        if isinstance(update, DTensor):
            whole = orthogonal(update.full_tensor())
            return distribute_tensor(
                whole, update.device_mesh, update.placements, src_data_rank=None
            )
        return orthogonal(update)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with singular values of about one, and larger where it has more rows than columns."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return (matrix.shape[0] / matrix.shape[1]) ** 0.5 * wide.T if tall else wide
