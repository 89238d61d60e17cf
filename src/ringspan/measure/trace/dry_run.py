"""The real step of the real model, traced on fake tensors as one rank of many: nothing is computed or sent."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.tile import Tile
from ringspan.measure.trace.torch_seams import real_meshes
from ringspan.measure.trace.tracker import MemoryTracker, Moment, end_step, train_step
from ringspan.plan.cost.memory import Memory
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.reader import config_of
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.planner import Plan
from ringspan.torch.engine.kernels import registered
from ringspan.torch.engine.kernels.device import (
    ChunkSize,
    DeviceRules,
    ruled_by,
    rules_of,
)
from ringspan.torch.engine.kernels.local.eager import Eager
from ringspan.torch.engine.transport.protocol import (
    FakeTransport,
    Nobody,
    transport_registered,
)
from ringspan.torch.model.memory.adamw import HostAdamW
from ringspan.torch.model.support import refuse_config
from ringspan.torch.parallelize import put_on_mesh
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.torch.runtime.mesh import make_mesh
from ringspan.torch.shard_batch import shard_batch

_TIMELINE_MOMENTS: Final = 400


@dataclass(frozen=True)
class Trace:
    rank: int
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total_bytes)


def trace(config: PreTrainedConfig, setting: Setting, rank: int = 0) -> Trace:
    """Trace a training step as ``rank`` of ``replicate x ring x tp``; raise like ``check_rank``."""
    # The process group is fake and sends nothing.
    check_rank(config, setting, rank)
    tracker = MemoryTracker(is_fake=True)
    with (
        fake_mesh(setting, rank, "cpu") as mesh,
        transport_registered(
            mesh.get_group("ring"),
            lambda signature: FakeTransport(Nobody(tracker.communicate)),
        ),
        ruled_by(cpu=_without_values(setting.on_gpu)),
        registered(_OneChunk()),
        real_meshes(),
        FakeTensorMode(allow_non_fake_inputs=True),
        tracker,
    ):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype_named(setting.parameter_dtype)
        ).train()
        # Host memory counts only on a CPU, which is its own host.
        on_host = _FarHostAdamW if setting.on_gpu else HostAdamW
        model, optimizer, batch = prepare(model, mesh, setting, host_optimizer=on_host)
        tracker.watch_model(model)
        _settle(tracker, model, optimizer)
        watch_step(tracker, model, optimizer, batch)
    return Trace(rank, tuple(tracker.moments))


def prepare(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    setting: Setting,
    *,
    host_optimizer: type[HostAdamW] = HostAdamW,
) -> tuple[Any, Optimizer, dict[str, torch.Tensor]]:
    """Return the model on a mesh, its optimizer and a batch of random tokens."""
    model = put_on_mesh(model, mesh, setting)
    if setting.optimizer_on_host:
        optimizer: Optimizer = host_optimizer(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, foreach=setting.on_gpu
        )
    return model, optimizer, _batch(model, mesh, setting)


def _settle(tracker: MemoryTracker, model: nn.Module, optimizer: Optimizer) -> None:
    """Do a first step's one-off work: FSDP pads and gathers, the optimizer makes its state, DTensor its plans."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
    # AdamW allocates its state in the first step, only for parameters with a gradient.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    end_step(tracker, model, optimizer)


def watch_step(
    tracker: MemoryTracker,
    model: nn.Module,
    optimizer: Optimizer,
    batch: dict[str, torch.Tensor],
) -> None:
    """Track a training step; the tracker forgets the moments before it."""
    tracker.watch("activations", batch.values())
    tracker.restart()
    train_step(tracker, model, optimizer, batch)


def _batch(
    model: PreTrainedModel, mesh: DeviceMesh, setting: Setting
) -> dict[str, torch.Tensor]:
    padded = batch_layout(
        setting.layout, setting.length, setting.ring, folds=setting.folds
    ).padded_length
    # Tokens differ, as a router would send equal ones to the same few experts.
    tokens = torch.randint(
        model.config.get_text_config().vocab_size, (setting.batch, padded)
    )
    device = next(model.parameters()).device
    split: Any = {"layout": setting.layout, "folds": setting.folds}
    return shard_batch(
        {"input_ids": tokens, "labels": tokens}, mesh, **split, device=device
    )


def _without_values(on_gpu: bool) -> DeviceRules:
    """Return a CPU's or GPU's device rules for tensors without values; fake CUDA tensors would need a GPU."""
    # Tensors without values cannot be offloaded to a file, and any module passes a probe.
    rules = (
        DeviceRules(cuts_for_cores=False) if on_gpu else rules_of(torch.device("cpu"))
    )
    return replace(rules, offloads_to="nowhere", probe_tokens=1)


class _OneChunk(Eager):
    """Plain PyTorch on a single chunk of a launch's scores: without values, all chunks cost the same."""

    def heads(
        self, q: Tensor, k: Tensor, tile: Tile, size: ChunkSize
    ) -> Iterator[tuple[int, slice, slice]]:
        return islice(super().heads(q, k, tile, size), 1)

    def chunks(
        self, tile: Tile, size: ChunkSize
    ) -> Iterator[tuple[slice, list[slice]]]:
        # The largest chunk stands for all, the first of several.
        pieces = ((rows, keys[0]) for rows, keys in super().chunks(tile, size) if keys)
        rows, keys = max(
            pieces, key=lambda pair: prod(part.stop - part.start for part in pair)
        )
        yield rows, [keys]


class _FarHostAdamW(HostAdamW):
    """``HostAdamW`` as a GPU's memory sees it: the step is elsewhere, weights change in place."""

    def step(self, closure: object = None) -> None:
        del closure


def check_rank(config: PreTrainedConfig, setting: Setting, rank: int) -> None:
    """Raise ConfigError for a rank outside the mesh or a process group, UnsupportedError for a model no ring runs."""
    ranks = setting.devices
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"--rank {rank}: there are {ranks} ranks, 0 to {ranks - 1}; use one"
        )
    if dist.is_initialized():
        raise ConfigError(
            "one rank of many needs a process of its own: this one is already in a process group"
        )
    refuse_config(config)


@contextmanager
def fake_mesh(setting: Setting, rank: int, device_type: str) -> Iterator[DeviceMesh]:
    """Build a step's mesh as one of its ranks sees it, in a process group that sends nothing."""
    dist.init_process_group(
        "fake", rank=rank, world_size=setting.devices, store=FakeStore()
    )
    try:
        yield make_mesh(device_type, setting.replicate, setting.ring, setting.tp)
    finally:
        # Imported here, since it takes half a second and only traces need it.
        from torch.distributed.tensor.debug import (
            _clear_sharding_prop_cache,
        )

        dist.destroy_process_group()
        # Otherwise DTensor would give this mesh's groups to a later one of the same shape.
        _clear_sharding_prop_cache()


def trace_plan(answer: Plan, rank: int) -> Trace:
    setting = answer.setting
    return trace(
        hugging_face_config(answer.question.shape, setting.length), setting, rank
    )


def summary(traced: Trace, budget_bytes: int) -> dict[str, Any]:
    """Return the traced bytes that ``ringspan plan --trace`` shows instead of the formula's, and the timeline."""
    peak, memory = traced.peak, Memory(traced.peak.phase, traced.peak.bytes)
    return {
        "fits": memory.needed_bytes <= budget_bytes,
        "peak_bytes": peak.total_bytes,
        "reserve_bytes": memory.reserve_bytes,
        "bytes": peak.bytes,
        "peak_moment": peak.phase,
        "rank": traced.rank,
        "timeline": [
            {"operator": moment.index, "phase": moment.phase, "bytes": moment.bytes}
            for moment in thinned(traced.moments, _TIMELINE_MOMENTS)
        ],
    }


def thinned(moments: Sequence[Moment], count: int) -> list[Moment]:
    """Return about ``count`` moments: the highest of each equal stretch."""
    stretch = max(1, -(-len(moments) // count))
    parts = (
        moments[first : first + stretch] for first in range(0, len(moments), stretch)
    )
    return [max(part, key=lambda moment: moment.total_bytes) for part in parts]


def hugging_face_config(shape: ModelShape, length: int) -> PreTrainedConfig:
    """Return a config of this shape and length; UnsupportedError for towers, adapters or few positions."""
    if shape.sees:
        raise UnsupportedError(
            f"{shape.name}: --trace builds language models, not {shape.model_type} with its towers"
        )
    if shape.lora:
        raise UnsupportedError(
            f"{shape.name}: --trace trains all weights; leave out --trace, or --lora"
        )
    if 0 < shape.positions < length:
        raise UnsupportedError(
            f"{shape.name} has {shape.positions:,} learned positions, fewer than --length {length}"
        )
    config = config_of(json.loads(shape.config), shape.name)
    if not shape.positions and hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = max(length, config.max_position_embeddings)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    return config
