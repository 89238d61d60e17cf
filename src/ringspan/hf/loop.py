"""An accelerate training loop on a ring."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Never

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ringspan.core.errors import CheckpointError, UnsupportedError
from ringspan.hf.config import RingConfig
from ringspan.hf.progress import load_optimizer, save_optimizer
from ringspan.hf.refusals import refuse_accelerator
from ringspan.hf.replicas import RingAccelerator, count_rings
from ringspan.hf.seams import plain_optimizer
from ringspan.torch.model.layers.modules import refusing
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.saving import whole_weights
from ringspan.torch.model.weights.shards import whole_name

_WEIGHTS = "model.safetensors"


def ring_accelerator(
    ring: RingConfig | None = None, **options: Any
) -> "LoopAccelerator":
    """Make an ``Accelerator`` that counts a ring as one process.

        accelerator = ringspan.hf.ring_accelerator(RingConfig(ring=4), gradient_accumulation_steps=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step(); scheduler.step(); optimizer.zero_grad()

    ``prepare`` only puts the model on the ring, where it takes whole batches. Loaders give a ring's ranks the same
    batches and replicas different ones; ``num_processes``, ``gather``, ``reduce`` and a scheduler's steps count
    replicas. Losses and weights are those of one process per replica, or of one with the whole batch. Every rank makes
    each call.

    Args:
        ring: sizes of the mesh and options of ``parallelize``; all ranks in one ring when None.
        options: those of ``accelerate.Accelerator``.

    Raises:
        UnsupportedError: another parallelism, or an option that would not be exact; names it and the alternative.
        ConfigError: a mesh that does not fit the number of ranks.
    """
    config = RingConfig() if ring is None else ring
    if config.balance != "none":
        raise UnsupportedError(
            f"balance={config.balance!r} is for trainers; a loop of your own must deal its own batches"
        )
    if config.async_save:
        raise UnsupportedError(
            "async_save=True is for trainers; save_state writes while the loop waits, so leave it out"
        )
    if config.watch_speed:
        raise UnsupportedError(
            "watch_speed=True is for trainers, whose steps it sees; leave it out"
        )
    for name in (
        "parallelism_config",
        "fsdp_plugin",
        "deepspeed_plugin",
        "deepspeed_plugins",
        "megatron_lm_plugin",
    ):
        if options.get(name) is not None:
            raise UnsupportedError(
                f"{name} is a second parallelism besides the ring; leave it out, and say RingConfig(ring=..., "
                "replicate=..., tp=...)"
            )
    if not torch.accelerator.is_available():
        # Otherwise accelerate counts one process on a machine without accelerators.
        options.setdefault("cpu", True)
    made = Accelerator(**options)
    refuse_accelerator(made)
    compiler: Any = made.state.dynamo_plugin
    if (backend := str(compiler.backend.value)) != "NO":
        raise UnsupportedError(
            f"dynamo_backend={backend!r} compiles the model around its exchanges; leave it out"
        )
    if not made.even_batches and config.replicas > 1:
        raise UnsupportedError(
            "even_batches=False: a replica would wait for batches that others lack; leave it out"
        )
    if made.ddp_handler is not None:
        raise UnsupportedError(
            "DistributedDataParallelKwargs are for DistributedDataParallel, in which a model on a ring is not wrapped; "
            "leave them out"
        )
    if made.dataloader_config.dispatch_batches:
        raise UnsupportedError(
            "leave dispatch_batches=True out: each rank reads its replica's batches"
        )
    ours: Any = count_rings(made, config.make_mesh(), config)
    ours.__class__ = LoopAccelerator
    return ours


def _refuse(name: str, advice: str) -> Callable[..., Never]:
    return refusing(f"accelerator.{name} is not for a ring; {advice}")


class LoopAccelerator(RingAccelerator):
    gather_for_metrics = _refuse(
        "gather_for_metrics",
        "model(**batch).loss is that of the whole batch already; use gather, with drop_last=True where examples do not "
        "come out even",
    )
    join_uneven_inputs = _refuse(
        "join_uneven_inputs", "loaders give all replicas as many batches"
    )
    maybe_context_parallel = _refuse(
        "maybe_context_parallel", "the model on the ring splits its batches itself"
    )
    trigger_sync_in_backward = _refuse("trigger_sync_in_backward", "use accumulate")

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> object:
        """Call ``Accelerator.prepare``; an optimizer of the model's parameters, without steps, gets their shards."""
        models = [item for item in args if isinstance(item, nn.Module)]
        names = {
            id(p): (model, name)
            for model in models
            for name, p in model.named_parameters()
        }
        for optimizer in (item for item in args if isinstance(item, Optimizer)):
            inner = plain_optimizer(optimizer)
            if inner.state:
                raise UnsupportedError(
                    "the optimizer has taken steps; prepare it, with its model, before the first"
                )
        prepared = super().prepare(*args, device_placement=device_placement)
        shards = {id(model): dict(model.named_parameters()) for model in models}
        for optimizer in (item for item in args if isinstance(item, Optimizer)):
            for group in plain_optimizer(optimizer).param_groups:
                group["params"] = [
                    shard
                    for parameter in group["params"]
                    for shard in _shards_of(parameter, names, shards)
                ]
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        """Prepare a scheduler that steps once per replica, as accelerate's per process."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        prepared: Any = super().prepare_scheduler(scheduler)
        prepared.__class__ = _ReplicaScheduler
        prepared.ring_replicas = self.num_processes
        return prepared

    def get_state_dict(self, model: RingModel, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights on rank 0, none on others."""
        return whole_weights(model)

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        **kwargs: object,
    ) -> Path:
        """Save the state, optimizers' in shards that ``load_state`` reads on any mesh."""
        if not safe_serialization:
            raise UnsupportedError(
                "safe_serialization=False writes pickles; leave it out"
            )
        with self._without_split() as (models, optimizers), ExitStack() as stack:

            def write(_: object, weights: list[dict[str, Any]], folder: str) -> None:
                weights.extend(self.get_state_dict(model) for model in models)
                for number, optimizer in enumerate(optimizers):
                    place, model = (
                        Path(folder) / f"optimizer_{number}",
                        _model_of(optimizer, models),
                    )
                    save_optimizer(place, model, plain_optimizer(optimizer), self.step)

            stack.callback(self.register_save_state_pre_hook(write).remove)
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Load what ``save_state`` wrote on any mesh; CheckpointError if missing, damaged or another model's."""
        with self._without_split() as (models, optimizers), ExitStack() as stack:

            def read(_: object, folder: str) -> None:
                """Load each model's weights and each optimizer's state, in accelerate's order."""
                for number, model in enumerate(models):
                    file = Path(folder) / (
                        _WEIGHTS if number == 0 else f"model_{number}.safetensors"
                    )
                    if not file.is_file():
                        raise CheckpointError(
                            f"{file}: is missing; give a folder that save_state wrote"
                        )
                    missing, unexpected = model.load_state_dict(
                        load_file(file), strict=False
                    )
                    tied = set(getattr(model, "_tied_weights_keys", None) or ())
                    if wrong := [
                        *unexpected,
                        *(name for name in missing if name not in tied),
                    ]:
                        raise CheckpointError(
                            f"{file}: {wrong[0]} does not fit this model; load one of this model"
                        )
                for number, optimizer in enumerate(optimizers):
                    model = _model_of(optimizer, models)
                    load_optimizer(
                        Path(folder) / f"optimizer_{number}",
                        model,
                        plain_optimizer(optimizer),
                    )

            stack.callback(self.register_load_state_pre_hook(read).remove)
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextmanager
    def _without_split(
        self,
    ) -> Iterator[tuple[list[RingModel], list[AcceleratedOptimizer]]]:
        """Yield models and optimizers, hidden from accelerate while it saves or loads all other objects."""
        kept = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield kept
        finally:
            self._models, self._optimizers = kept


class _ReplicaScheduler(AcceleratedScheduler):
    ring_replicas: int

    def step(self, *args: object, **kwargs: object) -> None:
        if (
            not self.step_with_optimizer
            or self.split_batches
            or not self.gradient_state.sync_gradients
        ):
            return super().step(*args, **kwargs)
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return None
        for _ in range(self.ring_replicas):
            last = getattr(self.scheduler, "total_steps", None)  # OneCycle ends there
            if last is None or self.scheduler._step_count <= last:
                self.scheduler.step(*args, **kwargs)
        return None


def _shards_of(
    parameter: nn.Parameter,
    names: dict[int, tuple[nn.Module, str]],
    shards: dict[int, dict[str, nn.Parameter]],
) -> list[nn.Parameter]:
    """Return the shard of a parameter, or of experts that are gathered in slices, each slice's."""
    if id(parameter) in names:
        model, name = names[id(parameter)]
        found = shards[id(model)]
        if name in found:
            return [found[name]]
        return [shard for own, shard in found.items() if whole_name(own) == name]
    if any(parameter is shard for each in shards.values() for shard in each.values()):
        return [parameter]
    raise UnsupportedError(
        "the optimizer has parameters of no model that was prepared; prepare both in one call"
    )


def _model_of(optimizer: Optimizer, models: list[RingModel]) -> RingModel:
    first = plain_optimizer(optimizer).param_groups[0]["params"][0]
    return next(
        model for model in models if any(p is first for p in model.parameters())
    )
