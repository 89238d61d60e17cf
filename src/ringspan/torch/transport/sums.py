"""Differentiable sums over ranks, in forward or in backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Sum(torch.autograd.Function):
    """Sum over groups' ranks; each rank uses the whole sum, and its gradient is the rank's own part."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class SumOfGradients(torch.autograd.Function):
    """A value shared by a group, used by each rank for a part of the result; its gradient parts are summed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
