"""Training steps of a small model on the ranks and devices at hand: what ``ringspan doctor`` means by "can train"."""

import time
import warnings
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import local_device
from ringspan.torch.shard_batch import shard_batch

STEPS: Final = 2
"""Optimizer steps of a trial; the loss after them tells whether the weights are right."""

WRONG: Final = 1e-4
"""Relative error of a loss in float32 that rounding does not explain: it is a thousandth of that."""

_TOKENS_PER_RANK: Final = 16


class Trial(NamedTuple):
    """Outcome of a trial on one rank: ``failure`` is the exception that ended it, at a time on this rank's clock."""

    error: float | None = None
    seconds: float | None = None
    failure: str | None = None
    failed_at: float | None = None


def try_training(mesh: DeviceMesh) -> Trial:
    """Train a Llama of two layers for two steps on a mesh, and compare its losses with one process.

    Collective. An exception is returned, not raised, so that the rank can still tell its launcher of it.
    """
    started = time.perf_counter()
    try:
        error = _worst_error(mesh)
    except Exception as failure:
        return Trial(
            failure=f"{type(failure).__name__}: {failure}", failed_at=time.time()
        )
    return Trial(error, time.perf_counter() - started)


def _worst_error(mesh: DeviceMesh) -> float:
    """Return any rank's largest relative error of the losses before, between and after the optimizer steps."""
    device, ring = local_device(), mesh.get_group("ring")
    length = _TOKENS_PER_RANK * ring.size()
    ids = torch.randint(
        0, 256, (1, length), generator=torch.Generator().manual_seed(0)
    ).to(device)
    batch = {"input_ids": ids, "labels": ids}
    alone: Any = small_llama(length)
    expected = _losses(alone.to(device), batch)
    model = parallelize(small_llama(length), mesh, watchdog=False)
    found = _losses(model, shard_batch(batch, mesh))
    error = ((found - expected) / expected).abs().amax()
    error = torch.where(error.isnan(), torch.inf, error)
    dist.all_reduce(error, dist.ReduceOp.MAX, group=ring)
    return float(error)


def small_llama(length: int, layers: int = 2) -> LlamaForCausalLM:
    """Make a Llama that computes next to nothing, with the same weights each time."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=length,
        )
        return LlamaForCausalLM(config)


def _losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the losses before each optimizer step and after the last."""
    # With a large eps, rounding does not move an entry with a gradient of nearly zero.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(**batch).loss)
    return torch.stack(losses).float()
