"""Lightning's strategy for already split models, over a mesh with a ring."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.lightning.saving import AsyncSaves
from ringspan.proof.before import prove_before
from ringspan.torch.model.consistency.calls import (
    Call,
    check_call,
    exchanging,
    hear_all,
    preparing,
)
from ringspan.torch.model.consistency.fixed import Fixed
from ringspan.torch.model.consistency.loop_watch import in_call
from ringspan.torch.model.memory.sharding import settle
from ringspan.torch.runtime.mesh import make_mesh, split_world


# Private names of Lightning that a ring uses; a test names those that a release has moved.
def give_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    private: Any = module
    private._device_mesh = mesh


class Dealing:
    """A rank's examples, in the order of the user's loader.

    Lightning's own training sampler shuffles even if the user's does not. So it is turned off, and created later with
    the loader's order.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._connector: Any = trainer._accelerator_connector
        self._data: Any = trainer._data_connector
        self._is_wanted: bool = self._connector.use_distributed_sampler
        self._is_ours = False

    def take_over(self, *, ours: bool) -> None:
        """Stop Lightning from distributing examples if ``ours``, else restore the user's setting."""
        self._is_ours = ours
        self._connector.use_distributed_sampler = self._is_wanted and not ours

    def dealt(self, loader: object, stage: object) -> object:
        """Return a loader of this rank's examples; the same loader if Lightning has distributed them."""
        if not self._is_ours or not isinstance(loader, DataLoader):
            return loader
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        with self._as_wanted():
            return self._data._prepare_dataloader(
                loader, shuffle=isinstance(sampler, RandomSampler), mode=stage
            )

    @contextmanager
    def _as_wanted(self) -> Iterator[None]:
        before, self._connector.use_distributed_sampler = (
            self._connector.use_distributed_sampler,
            self._is_wanted,
        )
        try:
            yield
        finally:
            self._connector.use_distributed_sampler = before


# For these precisions Lightning does nothing to a model, or what a ring's model does itself.
_PRECISIONS: Final = ("32-true", "bf16-mixed")
# Callbacks that work on whole weights, and how.
_CALLBACKS: Final = (
    (StochasticWeightAveraging, "copies"),
    (WeightAveraging, "copies"),
    (ModelPruning, "prunes"),
)


class RingStrategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` on a mesh of ``rs.init_mesh``: losses and weights equal one process.

        class Module(LightningModule):
            def configure_model(self):
                if self.model is None:
                    self.model = rs.parallelize(AutoModelForCausalLM.from_pretrained(...), self.device_mesh)

            def training_step(self, batch):
                return self.model(**rs.shard_batch(batch, self.device_mesh)).loss

    A ring's ranks get the same examples and replicas different ones, in the loader's order (Lightning's other
    strategies shuffle whatever trains); batch sizes are per replica. Checkpoints are Lightning's: a folder of shards,
    which loads on any mesh, or one file.

    Args:
        ring: ranks that share a sequence; all that the other two leave when None.
        replicate: rings that take different examples.
        tp: ranks that share tokens and split heads and features.
        save_distributed_checkpoint: each rank writes its shards into a folder; else rank 0 writes one file.
        process_group_backend: the devices' when None.
        timeout: of the process group.
        async_save: write checkpoints of ``fit`` during its steps, from a copy in host memory. A checkpoint appears
            under its name when it is complete, and those that it replaces are removed then.
        prove: before the first step, prove a small model like the module's exact with its options (``ringspan.prove``);
            rank 0 logs the verdict and its seconds, and a difference raises.

    Raises:
        ConfigError: sizes that do not multiply to the number of devices, when the trainer starts.
        UnsupportedError: a precision that would convert the weights, or a callback that needs them whole;
            ``ModelCheckpoint(save_last="link")`` with ``async_save``.
    """

    def __init__(
        self,
        *,
        ring: int | None = None,
        replicate: int = 1,
        tp: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        async_save: bool = False,
        prove: bool = False,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._sizes = ring, replicate, tp
        self._ring_mesh: DeviceMesh | None = None
        self._dealing: Dealing | None = None
        self._is_to_prove = prove
        self._saves = AsyncSaves() if async_save else None

    @property
    def device_mesh(self) -> DeviceMesh:
        """Mesh with the axes ``replicate`` and ``ring``, and ``tp`` if above 1."""
        if self._ring_mesh is None:
            raise ConfigError(
                "device_mesh: there is none before the trainer starts; use it in configure_model"
            )
        return self._ring_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        replicas = self.device_mesh["replicate"]
        return {"num_replicas": replicas.size(), "rank": replicas.get_local_rank()}

    def setup_environment(self) -> None:
        ring, replicate, tp = self._sizes
        found = split_world(self.num_nodes * self.num_processes, ring, replicate, tp)
        module = self.lightning_module
        assert module is not None, "connected before"
        _refuse_callbacks(module.trainer, async_save=self._saves is not None)
        super().setup_environment()  # creates a mesh of two axes that is not used
        # A trainer that fits and then validates has one model, and so keeps one mesh.
        if self._ring_mesh is None:
            self._ring_mesh = make_mesh(self.root_device.type, *found, tp)
        give_mesh(module, self._ring_mesh)
        if self._dealing is None:
            self._dealing = Dealing(module.trainer)
        self._dealing.take_over(ours=module.trainer.state.fn == TrainerFn.FITTING)

    def process_dataloader(self, dataloader: object) -> object:
        assert self._dealing is not None and self.lightning_module is not None, (
            "set up before"
        )
        stage = self.lightning_module.trainer.state.stage
        if stage == RunningStage.PREDICTING:
            _refuse_uneven(
                dataloader, self.lightning_module.trainer.limit_predict_batches
            )
        return self._dealing.dealt(dataloader, stage)

    def setup(self, trainer: Trainer) -> None:
        """Check that the model is on the ring and stays unchanged."""
        if self.precision_plugin.precision not in _PRECISIONS:
            raise UnsupportedError(
                f"precision={self.precision_plugin.precision!r} converts weights that are split already; use "
                "'32-true' or 'bf16-mixed', or parallelize(compute_dtype=torch.bfloat16)"
            )
        super().setup(trainer)
        assert self.model is not None, "set up above"
        if not self._on_ring():
            raise UnsupportedError(
                "RingStrategy: there is no model on the ring in this module; put it there in configure_model: "
                "self.model = rs.parallelize(model, self.device_mesh)"
            )
        if self._is_to_prove and trainer.state.fn == TrainerFn.FITTING:
            self._is_to_prove = False
            for model in self._on_ring():
                prove_before(model, self.device_mesh, model.ring_step)

        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, AgreedStop) for callback in callbacks):
            callbacks[:] = [ToldErrors(), *callbacks, AgreedStop(self.device_mesh)]

    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """Run Lightning's backward pass once all ranks have returned from ``training_step`` and its callbacks."""
        module: Any = self.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        check_call(self.device_mesh, Call("a backward pass"))
        with exchanging():
            self.precision_plugin.backward(
                closure_loss, module, optimizer, *args, **kwargs
            )
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks about the user's exception; Lightning raises it."""
        super().on_exception(exception)
        if self._ring_mesh is not None and isinstance(exception, Exception):
            with suppress(Exception), preparing(self._ring_mesh, "the trainer"):
                raise exception

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's shards, or on rank 0 all of it; on every rank."""
        check_call(self.device_mesh, Call("saving a checkpoint"))
        self._settle()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: object) -> dict[str, Any]:
        """Return an optimizer's shards of state, or on rank 0 all of it."""
        inner: Any = (
            optimizer.optimizer
            if isinstance(optimizer, LightningOptimizer)
            else optimizer
        )
        is_new = not inner.state
        state = super().optimizer_state(inner)
        if is_new:  # torch has taken a step of length 0 to create a state
            inner.state.clear()
            for values in state.get("state", {}).values():
                values |= {
                    name: torch.zeros_like(value)
                    for name, value in values.items()
                    if name == "step"
                }
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; with ``async_save``, during ``fit``, return once it is copied."""
        state = self._trainer.state
        is_fitting = (
            state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        )
        # Nothing would wait for the end of a save outside of a fit.
        if self._saves is None or not is_fitting or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        if self._save_distributed_checkpoint:
            self._saves.begin_folder(path, checkpoint)
            return
        copied = copy.deepcopy(checkpoint) if self.is_global_zero else {}
        self._saves.begin_file(
            path, lambda scratch: self.checkpoint_io.save_checkpoint(copied, scratch)
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint once the one that is being written is complete."""
        if self._saves is None:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            remove = self.checkpoint_io.remove_checkpoint
            self._saves.remove(lambda: remove(filepath))

    def finish_save(self) -> None:
        """Wait for a checkpoint that is being written; CheckpointError on all ranks if it was not saved."""
        if self._saves is not None:
            self._saves.finish()

    def teardown(self) -> None:
        # After an error of the training, which is raised, too.
        if self._saves is not None:
            self._saves.settle()
        super().teardown()

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None, "connected before"
        return self.lightning_module.trainer

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load model and optimizers from a checkpoint of any mesh."""
        self.finish_save()
        self._settle()
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _on_ring(self) -> list[Any]:
        assert self.model is not None
        return [module for module in self.model.modules() if isinstance(module, Fixed)]

    def _settle(self) -> None:
        for model in self._on_ring():
            settle(model)


class ToldErrors(Callback):
    """First of a trainer's callbacks: tells other ranks of an error before later callbacks save on all ranks."""

    def on_exception(
        self, trainer: Trainer, pl_module: object, exception: BaseException
    ) -> None:
        trainer.strategy.on_exception(exception)


def _agreeing(event: str) -> Callable[..., None]:
    def agree(self: "AgreedStop", trainer: Trainer, *_: object, **__: object) -> None:
        with in_call(event):
            trainer.should_stop = any(
                hear_all(self.mesh, Call(event, said=bool(trainer.should_stop)))
            )

    return agree


class AgreedStop(Callback):
    """Last of a trainer's callbacks: all ranks stop if ``trainer.should_stop`` is set on any."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    on_train_start = _agreeing("the start of training")
    # Before Lightning fetches another batch.
    on_train_batch_end = _agreeing("the end of a training batch")
    # Before gradients are clipped, which all ranks do together.
    on_before_optimizer_step = _agreeing("an optimizer step")
    on_validation_end = _agreeing("the end of a validation")
    on_train_epoch_end = _agreeing("the end of an epoch")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree, since no rank may be gone when another one raises, and wait for the last checkpoint."""
        _agreeing("the end of training")(self, trainer)
        if isinstance(trainer.strategy, RingStrategy):
            trainer.strategy.finish_save()


def _refuse_callbacks(trainer: Any, *, async_save: bool) -> None:
    for callback in trainer.callbacks:
        links = isinstance(callback, ModelCheckpoint) and callback.save_last == "link"
        if links and async_save:
            raise UnsupportedError(
                "ModelCheckpoint(save_last='link') links a checkpoint that async_save=True has not written yet; use "
                "save_last=True"
            )
        for kind, does in _CALLBACKS:
            if isinstance(callback, kind):
                raise UnsupportedError(
                    f"{type(callback).__name__} {does} whole weights, which are split on a ring; leave it out"
                )


def _refuse_uneven(loader: object, limit: float) -> None:
    """Raise UnsupportedError for replicas with different numbers of batches under ``limit_predict_batches``."""
    batches: Any = loader.batch_sampler if isinstance(loader, DataLoader) else None
    sampler = getattr(batches, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    examples, replicas, batch = (
        sampler.total_size,
        sampler.num_replicas,
        batches.batch_size,
    )
    counts = examples // replicas, -(-examples // replicas)
    fewest, most = (-(-count // batch) for count in counts)
    if _limited(fewest, limit) != _limited(most, limit):
        even = [str(count * replicas) for count in counts if count]
        fewer = f", or limit_predict_batches={fewest}" if fewest else ""
        raise UnsupportedError(
            f"predict: {examples} examples in batches of {batch} do not come out even on {replicas} replicas, which "
            f"would wait for each other; give {' or '.join(even)} examples{fewer}, or use "
            "RingStrategy(replicate=1)"
        )


def _limited(count: int, limit: float) -> int:
    return min(count, limit) if isinstance(limit, int) else int(count * limit)
