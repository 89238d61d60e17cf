"""The real training step of the real model, traced on fake tensors as one rank of many: nothing is computed or sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ringspan.core.errors import ConfigError
from ringspan.core.layout import Layout, LayoutName
from ringspan.plan.tracker import MemoryTracker, Moment, train_step
from ringspan.torch.batch import shard_batch
from ringspan.torch.models import parallelize, refuse_config
from ringspan.torch.remat import CheckpointName

_STEPS: Final = 2  # in the first one the optimizer has no state yet, and DTensor fills its caches


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """One training step: its length, how it is split, and what it computes and keeps in.

    ``batch`` is the number of sequences of this rank's micro-step; ``dtype`` what layers compute in,
    ``parameter_dtype`` what parameters, gradients and moments are kept in. ``on_gpu`` traces what a GPU would do where
    it differs from a CPU: heads of attention in one group, and the optimizer on all parameters at once.
    """

    length: int
    ring: int = 1
    replicate: int = 1
    batch: int = 1
    layout: LayoutName = "zigzag"
    checkpoint: CheckpointName = "attention"
    dtype: str = "bfloat16"
    parameter_dtype: str = "float32"
    loss_chunk_tokens: int = 1024
    on_gpu: bool = True


@dataclass(frozen=True)
class Trace:
    """What one rank holds over a training step: every change, in order, and the highest."""

    rank: int
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total_bytes)


def trace(config: PreTrainedConfig, setup: StepSetup, rank: int = 0) -> Trace:
    """Trace ``parallelize``, forward, loss, backward, clipping and AdamW as ``rank`` of ``ring x replicate``.

    The process must not be in a process group: a fake one is made, in which nothing is sent.

    Raises:
        ConfigError: a rank outside of the mesh, or a process group that already exists.
        UnsupportedError: what ``parallelize`` refuses.
    """
    ranks = setup.ring * setup.replicate
    if not 0 <= rank < ranks:
        raise ConfigError(f"--rank {rank}: there are {ranks} ranks, 0 to {ranks - 1}")
    if dist.is_initialized():
        raise ConfigError("a dry run needs a process of its own: this one is already in a process group")
    refuse_config(config)
    tracker = MemoryTracker(head_groups=1 if setup.on_gpu else None, is_fake=True)
    with _fake_group(rank, ranks):
        mesh = init_device_mesh("cpu", (setup.replicate, setup.ring), mesh_dim_names=("replicate", "ring"))
        with FakeTensorMode(allow_non_fake_inputs=True), tracker:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setup.parameter_dtype)).train()
            run_steps(tracker, model, mesh, setup)
    return Trace(rank, tuple(tracker.moments))


def run_steps(tracker: MemoryTracker, model: Any, mesh: DeviceMesh, setup: StepSetup) -> None:
    """Training steps of a model under a tracker, which is left with the moments of the last one."""
    device = next(model.parameters()).device
    model = parallelize(
        model,
        mesh,
        layout=setup.layout,
        checkpoint=setup.checkpoint,
        loss_chunk_tokens=setup.loss_chunk_tokens,
        compute_dtype=getattr(torch, setup.dtype),
    )
    tracker.watch_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=setup.on_gpu)
    padded = Layout(setup.layout, setup.length, setup.ring).padded_length
    tokens = torch.zeros(setup.batch, padded, dtype=torch.int64)
    batch = shard_batch({"input_ids": tokens, "labels": tokens}, mesh, layout=setup.layout, device=device)
    del tokens
    tracker.watch("activations", batch.values())
    for _ in range(_STEPS):
        tracker.restart()
        train_step(tracker, model, optimizer, batch)


def hugging_face_config(values: dict[str, Any]) -> PreTrainedConfig:
    """The config object of a config.json's values."""
    return AutoConfig.for_model(**values)


@contextmanager
def _fake_group(rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
