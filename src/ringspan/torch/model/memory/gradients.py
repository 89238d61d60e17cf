"""Gradients of an optimizer step: summed over its micro-batches, their norm over all shards, and its limit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringspan.torch.model.layers.modules import local_part


def accumulate(
    model: Any, parts: Iterable[Mapping[str, Tensor]], num_parts: int, num_targets: int
) -> Iterator[Any]:
    """Run each micro-batch of a step forward and backward, and yield its output.

    Losses are sums over the targets of a micro-batch, over ``num_targets``, the targets of all of them on all replicas.
    """
    for number, part in enumerate(parts, start=1):
        # Gradients are summed over replicas only in the last micro-step.
        model.set_requires_all_reduce(number == num_parts)
        output = model(**part, num_items_in_batch=num_targets)
        output.loss.backward()
        yield output


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients, of shards as a DTensor."""
    # A sum in bfloat16 would miss small gradients. Ranks reduce one norm, not one for each parameter.
    norms = [
        torch.linalg.vector_norm(
            p.grad, dtype=torch.promote_types(p.grad.dtype, torch.float32)
        )
        for p in parameters
        if p.grad is not None
    ]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def clip_gradients(parameters: Sequence[Tensor], norm: Tensor, most: float) -> None:
    """Scale gradients whose norm, whole on each rank, is above a limit."""
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).mul_(factor)
