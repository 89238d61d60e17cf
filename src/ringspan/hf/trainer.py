"""Mix-in that lets transformers' Trainer and its subclasses train on a ring."""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PredictionOutput, TrainOutput, seed_worker

from ringspan.hf.balance import balance_steps
from ringspan.hf.batches import classifies, takes_whole_batches, whole_logits
from ringspan.hf.config import RingConfig
from ringspan.hf.progress import load_optimizer, save_optimizer
from ringspan.hf.refusals import (
    explained,
    refuse_accelerator,
    refuse_arguments,
    refuse_callback,
    refuse_optimizer,
    refuse_vllm,
)
from ringspan.hf.replicas import RingAccelerator, count_rings, without_repeats
from ringspan.hf.rollouts import (
    count_generations,
    generation_of_rings,
    share_rollouts,
)
from ringspan.hf.routes import keep_routes
from ringspan.hf.saving import AsyncSaves, note_best
from ringspan.hf.seams import (
    OwnParts,
    TrainerSeams,
    check_seams,
    method_behind,
    plain_optimizer,
)
from ringspan.hf.speed import WatchSpeed
from ringspan.torch.data.batch import targets_of
from ringspan.torch.data.padding import real_tokens
from ringspan.torch.model.consistency.calls import Call, check_call, hear_all, preparing
from ringspan.torch.model.consistency.loop_watch import in_call
from ringspan.torch.model.layers.modules import whole
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.runtime.mesh import wait_for

_SCHEDULER: Final = "scheduler.pt"
_ARGUMENTS: Final = "training_args.bin"
_CHECKPOINT: Final = "checkpoint"
# After these events a trainer acts on callbacks' requests, or returns; requests of other events are agreed on then.
_EVENTS: Final = frozenset(
    f"on_{event}"
    for event in (
        "substep_end",
        "step_end",
        "epoch_end",
        "evaluate",
        "predict",
        "save",
        "train_end",
    )
)


class AgreedCallbacks(CallbackHandler):
    """Mix-in for a trainer's callbacks: any rank's request (to stop, save, evaluate, log) holds for all.

    ``on_save`` comes once a checkpoint that is written during training is complete, with the state of its step.
    """

    ring_mesh: DeviceMesh
    saves: AsyncSaves
    finish_save: Callable[[TrainerControl], TrainerControl]

    def call_event(
        self,
        event: str,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> TrainerControl:
        control = super().call_event(event, args, state, control, **kwargs)
        return self._agreed(event, control) if event in _EVENTS else control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: object,
        **kwargs: object,
    ) -> TrainerControl:
        """Call Trainer's event, and agree unless a user calls ``trainer.log``, usually on one rank."""
        is_trainers = control.should_log
        control = super().on_log(args, state, control, logs, **kwargs)
        return self._agreed("on_log", control) if is_trainers else control

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> TrainerControl:
        """Call Trainer's event, or later if the checkpoint is still being written."""
        if not self.saves.is_begun:
            return super().on_save(args, state, control, **kwargs)
        control.should_save = False
        return control

    def _agreed(self, event: str, control: TrainerControl) -> TrainerControl:
        asked = [
            field.name for field in fields(control) if getattr(control, field.name)
        ]
        said = (asked, self.saves.has_written())
        with in_call(event):
            told = hear_all(self.ring_mesh, Call(event, said=said))
            for name in {name for names, _ in told for name in names}:
                setattr(control, name, True)
        if event == "on_step_end" and all(has_written for _, has_written in told):
            return self.finish_save(control)
        return control


class RingTrainerMixin(TrainerSeams):
    """Mix-in before a trainer of transformers or TRL: its model is split over a ring, and all else keeps its meaning.

        class Trainer(RingTrainerMixin, transformers.Trainer): ...

    Losses, gradients, metrics and weights are those of one process. To the trainer a ring is one process: batch sizes
    are per replica, and a ring's ranks get the same examples. Call ``train``, ``evaluate``, ``predict`` and
    ``save_model`` on every rank.

    Args:
        ring: sizes of the mesh and options of ``parallelize``; the model goes onto the ring when the trainer is made.
        args, kwargs: the trainer's own.

    Raises:
        UnsupportedError: an argument of the trainer that would not be exact on a ring, or a second parallelism.
        ConfigError: a mesh that does not fit the number of ranks.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Insert our versions of Trainer's parts right before Trainer, after all classes that override them."""
        super().__init_subclass__(**kwargs)
        if issubclass(cls, Trainer) and not issubclass(cls, OwnParts):
            last = max(
                place
                for place, base in enumerate(cls.__bases__)
                if issubclass(base, Trainer)
            )
            bases = (*cls.__bases__[: last + 1], OwnParts, *cls.__bases__[last + 1 :])
            cls.__bases__ = tuple(base for base in bases if base is not Trainer)

    ring: RingConfig
    ring_mesh: DeviceMesh
    ring_saves: AsyncSaves
    model: RingModel
    accelerator: RingAccelerator
    args: TrainingArguments
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler

    def __init__(
        self, *args: object, ring: RingConfig | None = None, **kwargs: object
    ) -> None:
        self.ring = RingConfig() if ring is None else ring
        check_seams()
        self.ring_saves = AsyncSaves()
        with generation_of_rings(type(self), self.ring):
            super().__init__(*args, **kwargs)
        refuse_optimizer(self.optimizer, self.model)
        for callback in self.callback_handler.callbacks:
            refuse_callback(callback)
        self._speed = WatchSpeed(self.ring_mesh) if self.ring.watch_speed else None
        if self._speed is not None:
            self.add_callback(self._speed)
        share_rollouts(self)
        keep_routes(self, self.ring)
        agree_on(self)

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """Train; one rank's error of a callback, data set or user function is raised on all."""
        try:
            with preparing(self.ring_mesh, "train"):
                return super().train(*args, **kwargs)
        finally:
            self.ring_saves.settle()
            if self._speed is not None:
                self._speed.close()

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """Evaluate; errors as in ``train``."""
        with preparing(self.ring_mesh, "evaluate"):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: object, **kwargs: object) -> PredictionOutput:
        """Predict; errors as in ``train``."""
        with preparing(self.ring_mesh, "predict"):
            return super().predict(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Log as the trainer does; the losses of steps with what ``watch_speed`` has compared."""
        if self._speed is not None and "loss" in logs:
            logs = logs | self._speed.metrics
        super().log(logs, *args, **kwargs)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback, unless it would not be exact."""
        refuse_callback(callback)
        super().add_callback(callback)

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that counts rings, and put the model on the mesh before anything inspects it."""
        refuse_arguments(self.args, self.ring)
        refuse_vllm(self.args, self.ring)
        super().create_accelerator_and_postprocess()
        refuse_accelerator(self.accelerator)
        self.ring_mesh = self.ring.make_mesh()
        # An existing group, or one on CPUs, does not have ddp_timeout yet.
        if self.args.ddp_timeout != TrainingArguments.ddp_timeout:
            wait_for(self.ring_mesh, self.args.ddp_timeout)
        self.accelerator = count_rings(self.accelerator, self.ring_mesh, self.ring)
        count_generations(self.args, self.accelerator.num_processes)
        if self.model is not None:
            self._put_on_ring(self.model)

    def call_model_init(self, trial: object = None) -> nn.Module:
        model = super().call_model_init(trial)
        self._put_on_ring(model)
        return model

    def _put_on_ring(self, model: nn.Module) -> None:
        autocast = self.accelerator.autocast if self.accelerator.native_amp else None
        takes_whole_batches(model, self.ring_mesh, self.ring, autocast)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return Trainer's batches, equal within a ring; random draws of workers differ by replica too."""
        loader = super().get_train_dataloader()
        if getattr(loader, "worker_init_fn", None) is not None:
            workers = self.args.dataloader_num_workers
            loader.worker_init_fn = partial(
                seed_worker, num_workers=workers, rank=self.accelerator.process_index
            )
        if self.ring.balance == "flops":
            balance_steps(self, loader)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return a step's batches, equal in number on all ranks before replicas count targets together."""
        if self.accelerator.num_processes > 1:
            batches = list(islice(epoch_iterator, num_batches))
            check_call(
                self.ring_mesh,
                Call("reading a step's batches", {"number of batches": len(batches)}),
            )
            epoch_iterator = iter(batches)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the examples per step: per replica, times accumulation, times replicas."""
        return (
            self._train_batch_size
            * args.gradient_accumulation_steps
            * self.accelerator.num_processes
        )

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        ranks = self.ring_mesh.size() // self.accelerator.num_processes
        return super().floating_point_ops(inputs) // ranks

    def training_step(self, *args: object, **kwargs: object) -> Tensor:
        """Run Trainer's step; a loss with a penalty on weights may be a ``DTensor``."""
        with explained(method_behind(self, "compute_loss")):
            loss = super().training_step(*args, **kwargs)
        return whole(loss)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: object, **kwargs: object
    ) -> Any:
        """Compute the loss; raise if a user's own function would get a target that is predicted from padding."""
        labels, ids = inputs.get("labels"), inputs.get("input_ids")
        asks = self.compute_loss_func is not None and not classifies(self.model)
        if (
            asks
            and isinstance(labels, Tensor)
            and isinstance(ids, Tensor)
            and labels.shape == ids.shape
        ):
            with preparing(self.ring_mesh, "a forward pass"):
                targets_of({"input_ids": ids, "labels": labels}, real_tokens(inputs))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Run Trainer's step; return logits (B, S, V) in sequence order if wanted."""
        if not classifies(self.model):  # a classifier's loss covers only its replica
            inputs = without_repeats(self.accelerator, inputs)
        with whole_logits(self.model, wanted=not prediction_loss_only):
            found = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )
        loss, logits, labels = found
        return None if loss is None else whole(loss), logits, labels

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Save a folder that ``from_pretrained`` or PEFT opens; every rank calls it, rank 0 writes."""
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        if self.ring_saves.local is None:
            self.model.save_pretrained(folder)
        else:
            self.ring_saves.add_model(self.model, Path(folder))
        super().save_model(output_dir, _internal_call)

    def save_beside_model(self, output_dir: str | None) -> None:
        if not self.args.should_save:
            return
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        tokenizer = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, _ARGUMENTS))

    def save_progress(self, output_dir: str) -> None:
        """Save the optimizer's state, each rank its part; and the scheduler's, by rank 0."""
        # Raises on all ranks if saving anything before has failed on one.
        check_call(self.ring_mesh, Call("saving the optimizer"))
        optimizer, step = plain_optimizer(self.optimizer), self.state.global_step
        if self.ring_saves.local is None:
            save_optimizer(Path(output_dir), self.model, optimizer, step)
        else:
            self.ring_saves.add_optimizer(self.model, optimizer, step)
        if self.args.should_save:
            torch.save(
                self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER)
            )

    def begin_save(self, run: Path, collect: Callable[[], None]) -> None:
        """Collect a checkpoint by Trainer's own methods, and write it into the run's folder during training."""
        self.control = self.finish_save(self.control)
        target, saves = run / f"{_CHECKPOINT}-{self.state.global_step}", self.ring_saves
        with saves.collecting(target.name):
            collect()
            assert saves.local is not None, "collecting"
            writes = self.args.should_save
            note_best(self.state, saves.local, target, writes=writes)
            # Raises on all ranks if one could not collect its parts.
            check_call(self.ring_mesh, Call("saving a checkpoint"))
            saves.begin(target, self.state, self.args.save_total_limit)

    def finish_save(self, control: TrainerControl) -> TrainerControl:
        """Wait for the checkpoint that was begun, if any, and tell callbacks of it; CheckpointError on all ranks."""
        saved = self.ring_saves.finish()
        if saved is None:
            return control
        if saved.is_pushed:
            self.push_saved(str(saved.folder))
        return self.callback_handler.call_event(
            "on_save", self.args, saved.state, control
        )

    def load_progress(self, checkpoint: str) -> None:
        load_optimizer(Path(checkpoint), self.model, plain_optimizer(self.optimizer))
        state = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(state)


def agree_on(trainer: "RingTrainerMixin") -> None:
    """Agree in place on callbacks' requests, the first rank's metrics, and errors of user functions."""
    handler: Any = trainer.callback_handler
    mesh = trainer.ring_mesh
    handler.__class__, handler.ring_mesh = AgreedCallbacks, mesh
    handler.saves, handler.finish_save = trainer.ring_saves, trainer.finish_save
    own = ["compute_loss_func", "preprocess_logits_for_metrics", "compute_metrics"]
    if not method_behind(trainer, "compute_loss").__module__.startswith(
        ("transformers.", "trl.", "ringspan.")
    ):
        own.append("compute_loss")
    for name in own:
        if callable(function := getattr(trainer, name, None)):
            setattr(trainer, name, _together(function, name, mesh))


def _together(
    function: Callable[..., Any], name: str, mesh: DeviceMesh
) -> Callable[..., Any]:
    @functools.wraps(function)
    def agreed(*args: object, **kwargs: object) -> object:
        result = function(*args, **kwargs)
        with in_call(name):
            if name == "compute_metrics":
                return hear_all(mesh, Call(name, said=result))[0]
            check_call(mesh, Call(name))
        return result

    return agreed


class RingTrainer(RingTrainerMixin, Trainer):
    """transformers' ``Trainer`` on a ring."""
