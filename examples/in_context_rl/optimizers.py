"""Muon (Jordan et al. 2024) for the matrices of a decoder's layers, AdamW for the rest.

``torch.optim.Muon`` orthogonalises one matrix after the other in bfloat16. For dozens of matrices as small as these,
all of one shape at once in float32 take a fifth of the time on a CPU.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

MUON_RATE: Final = 0.02
ADAMW_RATE: Final = 3e-3
MOMENTUM: Final = 0.95


class Optimizers:
    """Both; their rates fall linearly over so many steps."""

    def __init__(self, agent: Any, steps: int) -> None:
        self.agent, self.steps, self.step_number = agent, steps, 0
        inner = {
            name
            for name, weight in agent.named_parameters()
            if weight.ndim == 2 and "layers" in name
        }
        self.by_shape: dict[torch.Size, list[DTensor]] = {}
        for name, weight in agent.named_parameters():
            if name in inner:
                self.by_shape.setdefault(weight.shape, []).append(weight)
        self.momenta = {
            shape: torch.zeros(len(some), *shape)
            for shape, some in self.by_shape.items()
        }
        others = [
            weight for name, weight in agent.named_parameters() if name not in inner
        ]
        self.adamw = torch.optim.AdamW(
            others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )

    @torch.no_grad()
    def step(self) -> None:
        """One step, with gradients clipped."""
        torch.nn.utils.clip_grad_norm_(self.agent.parameters(), 1.0)
        share = min(
            1.0, (self.step_number + 1) / 30, 2 * (1 - self.step_number / self.steps)
        )
        self.step_number += 1
        for shape, weights in self.by_shape.items():
            gradients = torch.stack([weight.grad.full_tensor() for weight in weights])
            momenta = self.momenta[shape].lerp_(gradients, 1 - MOMENTUM)
            change = (
                orthogonalised(gradients.lerp(momenta, MOMENTUM))
                * max(1, shape[0] / shape[1]) ** 0.5
            )
            for weight, one in zip(weights, change, strict=True):
                everywhere = DTensor.from_local(
                    one, weight.device_mesh, [Replicate()], run_check=False
                )
                mine = everywhere.redistribute(placements=weight.placements).to_local()
                weight.to_local().sub_(mine, alpha=MUON_RATE * share)
        self.adamw.param_groups[0]["lr"] = ADAMW_RATE * share
        self.adamw.step()
        self.agent.zero_grad()


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices (N, rows, columns) with singular values near 1 in their place, by five iterations of Newton-Schulz."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalised(matrices.mT).mT
    made = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = made @ made.mT
        made = 3.4445 * made + (-4.7750 * square + 2.0315 * square @ square) @ made
    return made
