"""Norms in blocks of tokens: transformers' RMS norms keep and make float32 copies as long as the sequence."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ringspan.torch.layers.blockwise.blocks import kind_of, mixes_tokens
from ringspan.torch.weights.loading import filled


def find_norms(decoder: nn.Module) -> list[nn.Module]:
    """Return the norms worth running in blocks, tried out; PyTorch's own save only their input."""
    verdicts: dict[Any, bool] = {}
    found: list[nn.Module] = []
    for module in decoder.modules():
        shapes = {tuple(p.shape) for p in module.parameters()}
        if len(shapes) != 1 or len(shape := shapes.pop()) != 1 or any(True for _ in module.children()):
            continue
        kind = kind_of(module)
        if kind not in verdicts:
            takes_one = len(inspect.signature(module.forward).parameters) == 1
            verdicts[kind] = takes_one and not mixes_tokens(module, *shape) and _keeps_more(module, *shape)
        if verdicts[kind]:
            found.append(module)
    return found


def _keeps_more(module: nn.Module, size: int) -> bool:
    kept: list[Tensor] = []
    with filled(module), torch.enable_grad(), saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        like = next(module.parameters())
        tokens = torch.zeros(1, 2, size, dtype=like.dtype, device=like.device, requires_grad=True)
        module(tokens)
    return any(x is not tokens and x.shape == tokens.shape for x in kept)
