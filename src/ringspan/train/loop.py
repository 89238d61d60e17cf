"""The training loop of every rank."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from ringspan.checkpoints.checkpoint import Checkpoints
from ringspan.checkpoints.shards import Manifest
from ringspan.checkpoints.state import random_state, restore, run_state
from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.core.files.disk import write_synced
from ringspan.torch.model.adapters import is_peft
from ringspan.torch.model.consistency.speed import SpeedWatch
from ringspan.torch.model.consistency.watchdog import Limits, Watchdog
from ringspan.torch.model.memory.adamw import own_state
from ringspan.torch.model.weights.writing import HEADROOM_BYTES
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.train.config.tables import TrainConfig
from ringspan.train.data.sequences import Sequences
from ringspan.train.guard import Guard, Verdict
from ringspan.train.job import Job, evaluate, prepare
from ringspan.train.metrics import MetricsWriter, StepMetrics
from ringspan.train.run_folder.export import model_bytes, save_model
from ringspan.train.run_folder.record import (
    EXPORTED,
    RunLock,
    RunRecord,
    TrainResult,
    finished,
)
from ringspan.train.run_folder.resume import begin_run, open_run, tokenizer_of
from ringspan.train.signals import StopRequest

if TYPE_CHECKING:
    from ringspan.measure.trace.profile import Profiler

# first steps whose balance by data.balance = "flops" is reported
_BALANCED_STEPS: Final = 100


@dataclass
class Observer:
    doing: Callable[[str], None] = lambda what: None
    started: Callable[[dict[str, Any]], None] = lambda facts: None
    stepped: Callable[[StepMetrics], None] = lambda metrics: None
    evaluated: Callable[[int, float], None] = lambda step, loss: None
    noticed: Callable[[str], None] = lambda line: None


def train(
    config: TrainConfig, observer: Observer | None = None, *, then_exit: bool = False
) -> TrainResult:
    """Train as configured and save the model to ``<run>/model``; every rank of the process group calls it.

    A step's loss is the sum over valid targets, on all ranks, replicas and micro-steps, over their count. A run resumes
    from its newest valid checkpoint. A stop signal to any rank ends all after the same step, saved; a second SIGINT
    ends a rank at once. With ``then_exit``, ranks ignore signals after the run.

    Raises:
        RingspanError: what is refused in config, data or model, before the run's folder is made.
        Diverged: a loss or gradient that is not finite; no rank has applied it.
        CheckpointError: no checkpoint is valid, or the last could not be written.
    """
    observer = observer if observer and dist.get_rank() == 0 else Observer()
    run = Path(config.run)
    with RunLock(run) as lock:
        record = open_run(config, lock)
        config = record.config
        job = prepare(
            config, None if record.is_new else tokenizer_of(run), observer.doing
        )
        begin_run(config, record, lock, job.model, job.tokenizer, job.data)
        limits = Limits(**dict(config.watchdog))
        with (
            StopRequest(observer.noticed) as stop,
            Watchdog(limits, run / "watchdog") as watchdog,
        ):
            result = _Run(job, record, stop, watchdog, observer).train()
            if then_exit:
                stop.ignore_from_now_on()
            return result


class _Run:
    def __init__(
        self,
        job: Job,
        record: RunRecord,
        stop: StopRequest,
        watchdog: Watchdog,
        observer: Observer,
    ) -> None:
        """Open the run's checkpoints, and a profiler if asked; nothing is trained yet."""
        self._job, self._config, self._record = job, job.config, record
        self._stop, self._watchdog, self._observer = stop, watchdog, observer
        self._folder = Path(job.config.run)
        self._guard = Guard(job.config.guard, stop, job.device)
        settings, folder = job.config.checkpoints, self._folder / "checkpoints"
        self._checkpoints = Checkpoints(
            folder,
            run_id=record.run_id,
            keep=settings.keep,
            asynchronous=settings.async_save,
        )
        self._step, self._loss, self._eval_loss = 0, math.nan, None
        self._eval_step: int | None = None  # the step whose weights had that loss
        self._speed: SpeedWatch | None = None
        self._profile = self._folder / "profile"
        self._profiler: Profiler | None = None
        if job.config.profile:
            # Imported here, since it brings in all of tracing and few runs are profiled.
            from ringspan.measure.trace import (
                profile,
            )

            self._profile.mkdir(exist_ok=True)
            rank = dist.get_rank()
            self._profiler = profile.Profiler(
                job.model,
                job.optimizer,
                rank,
                self._profile / f"snapshot-{rank}.pickle",
            )

    def train(self) -> TrainResult:
        """Train from the newest checkpoint to the last step or a stop signal; evaluate, save and export the model."""
        with self._watchdog.doing("resuming"):
            self._resume()
        self._say_if_the_disk_is_too_small()
        self._writer = (
            MetricsWriter(self._folder, self._step) if dist.get_rank() == 0 else None
        )
        if self._writer:
            self._observer.started(self._job.facts)
            self._notice(self._writer.notice)
            last = min(self._config.steps, self._step + _BALANCED_STEPS)
            self._notice(
                self._job.batches.describe_balance(range(self._step + 1, last + 1))
            )
        if self._config.watch_speed:
            self._speed = SpeedWatch(self._job.mesh, self._folder, self._notice)
        stopped = False
        try:
            while self._step < self._config.steps and not stopped:
                stopped = self._one_step()
            if (
                not stopped
                and self._job.data.eval is not None
                and self._eval_step != self._step
            ):
                # A run that was stopped at its last step has not evaluated it.
                with self._watchdog.doing("evaluation"):
                    self._evaluate(self._job.data.eval)
            with self._watchdog.doing("saving"):
                self._notice(self._checkpoints.wait())
                model = self._folder / "model"
                if not stopped:
                    self._export(model)
        finally:
            if self._speed is not None:
                self._speed.close()
            if self._writer:
                self._writer.close()
        self._checkpoints.close()
        return TrainResult(
            str(self._folder),
            str(model),
            self._step,
            self._loss,
            self._eval_loss if self._eval_step == self._step else None,
            self._job.facts,
            (self._stop.signal_name or "a signal to another rank") if stopped else None,
        )

    def _one_step(self) -> bool:
        """Run one step, then evaluate and save if due; return whether a signal stops the run here."""
        self._step += 1
        self._watchdog.step(self._step)
        metrics, verdict = self._take_step(self._profiler)
        self._notice(verdict.problem)
        if verdict.rewind and self._rewind():
            return False
        self._loss = metrics.loss
        compared = self._speed.step(self._step) if self._speed else None
        if self._writer:
            self._notice(self._writer.step(metrics))
            if compared is not None:
                self._notice(self._writer.speed(self._step, compared))
            self._observer.stepped(metrics)
        is_last = self._step == self._config.steps
        is_due = is_last or self._is_due(self._config.evaluation.every_steps)
        if self._job.data.eval is not None and is_due:
            with self._watchdog.doing("evaluation"):
                self._evaluate(self._job.data.eval)
        every = self._config.checkpoints.every_steps
        if verdict.stop or self._is_due(every) or (every and is_last):
            self._save(wait=verdict.stop)
        self._notice(self._checkpoints.poll())
        return verdict.stop and not is_last

    def _is_due(self, every: int) -> bool:
        """Return whether what happens every N steps happens after this one; 0: never."""
        return every > 0 and self._step % every == 0

    def _take_step(self, profiler: "Profiler | None") -> tuple[StepMetrics, Verdict]:
        """Run the job's step; after the last one that is profiled, draw the profile."""
        if profiler is None:
            return self._job.step(self._step, self._guard)
        with profiler.step():
            taken = self._job.step(self._step, self._guard)
        if profiler.result:
            self._write_profile(profiler)
            self._profiler = None
        return taken

    def _write_profile(self, profiler: "Profiler") -> None:
        from ringspan.measure.trace.profile import gathered

        with self._watchdog.doing("drawing the profile"):
            profiles = gathered(profiler)
            if dist.get_rank() == 0:
                from ringspan.report.profile_page import write_report

                mesh = " x ".join(
                    f"{axis} {self._job.mesh.get_group(axis).size()}"
                    for axis in ("replicate", "ring")
                )
                title = f"{self._config.run}: {self._config.data.sequence_length_tokens:,} tokens, {mesh}"
                self._notice(
                    f"profile  {write_report(profiles, self._profile, title)[0]}"
                )

    def _evaluate(self, sequences: Sequences) -> None:
        self._eval_loss = evaluate(self._job, sequences)
        self._eval_step = self._step
        if self._writer:
            self._notice(self._writer.evaluation(self._step, self._eval_loss))
            self._observer.evaluated(self._step, self._eval_loss)

    def _save(self, *, wait: bool) -> None:
        """Save weights, optimizer, random state and the data's position.

        With ``wait``, return only when it is on disk.
        """
        job = self._job
        state = {
            "num_sequences": job.batches.position(self._step),
            "guard": self._guard.state(),
            "base": job.base_digest,
            "loss": _json_number(self._loss),
            "eval_loss": _json_number(self._eval_loss),
            "eval_step": self._eval_step,
        }
        with self._watchdog.doing("saving"):
            error = self._checkpoints.save(
                self._step,
                run_state(job.model, job.optimizer),
                random_state(job.device) | own_state(job.optimizer),
                state,
                mesh={
                    axis: job.mesh.get_group(axis).size()
                    for axis in job.mesh.mesh_dim_names or ()
                },
                layout=self._config.attention.layout,
            )
            self._notice(error)
            if wait and (error := self._checkpoints.wait()) is not None:
                raise error

    def _export(self, folder: Path) -> None:
        """Write the finished model to ``folder`` and mark the step as exported.

        If that fails, make sure that a checkpoint holds the weights, and raise CheckpointError that says where.
        """
        dtype, merge = (
            dtype_named(self._config.model.dtype),
            self._config.adapter.merge,
        )
        problem = save_model(
            self._job.model, self._job.tokenizer, folder, dtype, merge=merge
        )
        if problem is None:
            if dist.get_rank() == 0:
                write_synced(self._folder / EXPORTED, f"{self._step}\n")
            return
        problem = f"{folder} was not written: {problem}"
        if self._checkpoints.newest_step != self._step:
            try:
                self._save(wait=True)
            except CheckpointError as error:
                newest = self._checkpoints.newest_step
                rest = (
                    "starts from the beginning"
                    if newest is None
                    else f"goes on from step {newest}"
                )
                raise CheckpointError(
                    f"{problem}; {error}; then the same command {rest}"
                ) from error
        raise CheckpointError(
            f"{problem}; the weights of step {self._step} are in {self._checkpoints.folder}: make room, then the same "
            "command writes the model"
        )

    def _is_exported(self, step: int) -> bool:
        marker = self._folder / EXPORTED
        return (
            (self._folder / "model").exists()
            and marker.exists()
            and int(marker.read_text()) >= step
        )

    def _say_if_the_disk_is_too_small(self) -> None:
        """Warn if the disk lacks room for a checkpoint (weights and AdamW's two moments) and the final model."""
        job = self._job
        weights = [weight for weight in job.model.parameters() if weight.requires_grad]
        # AdamW has two moments
        checkpoint = sum(
            3 * weight.numel() * weight.element_size() for weight in weights
        )
        dtype = dtype_named(self._config.model.dtype)
        is_adapter = is_peft(job.model) and not self._config.adapter.merge
        model = model_bytes(job.model, dtype, is_adapter=is_adapter) + HEADROOM_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < checkpoint + model:
            self._notice(
                f"{self._folder}: {free:,} bytes are free; a checkpoint takes about {checkpoint:,}, the model at the "
                f"end {model:,}: make room"
            )

    def _resume(self) -> None:
        """Continue from the newest valid checkpoint of a run that is not new.

        Raises if no checkpoint is valid, or if the run is already at or beyond its last step.
        """
        if self._record.is_new:
            return
        found = self._checkpoints.find()
        for line in (
            *(f"skipped {line}" for line in found.skipped),
            *self._record.changes,
        ):
            self._notice(line)
        if found.folder is None or found.manifest is None:
            if found.skipped:
                raise CheckpointError(
                    f"no checkpoint in {self._checkpoints.folder} is valid; remove the folder to start from the "
                    "beginning. " + "; ".join(found.skipped)
                )
            self._notice(
                f"{self._folder} has no checkpoint yet: starting from the beginning"
            )
            return
        if found.manifest.step >= self._config.steps and self._is_exported(
            found.manifest.step
        ):
            raise finished(self._config, found.manifest.step)
        if found.manifest.step > self._config.steps:
            raise ConfigError(
                f"{self._folder} has come to step {found.manifest.step}, beyond steps = {self._config.steps}; raise "
                "steps, or choose another folder with run=..."
            )
        self._restore(found.folder, found.manifest)
        self._step = found.manifest.step
        self._job.batches.seek(self._step, found.manifest.state["num_sequences"])
        self._notice(
            f"resuming after step {self._step} from {found.folder} (saved on "
            + " x ".join(f"{axis} {size}" for axis, size in found.manifest.mesh.items())
            + ")"
        )

    def _restore(self, folder: Path, manifest: Manifest) -> None:
        job, state = self._job, manifest.state
        if state.get("base") != job.base_digest:
            raise CheckpointError(
                f"{folder}: its adapter was trained with other weights than model.path = "
                f"{job.config.model.path!r} has now; restore them, or start a new run with run=..."
            )
        restore(
            self._checkpoints, folder, manifest, job.model, job.optimizer, job.device
        )
        self._guard.restore(state["guard"])
        self._loss = math.nan if state["loss"] is None else state["loss"]
        self._eval_loss, self._eval_step = state["eval_loss"], state.get("eval_step")

    def _rewind(self) -> bool:
        """Load the newest checkpoint after a spike, and continue with the data after it.

        Return whether there is one.
        """
        with self._watchdog.doing("rewinding"):
            self._notice(self._checkpoints.wait())
            found = self._checkpoints.find()
            if found.folder is None or found.manifest is None:
                self._notice(
                    f"step {self._step}: there is no checkpoint to rewind to; skipped"
                )
                return False
            num_sequences = self._job.batches.position(self._step)
            self._restore(found.folder, found.manifest)
            self._step = found.manifest.step
            self._job.batches.seek(self._step, num_sequences)
            if self._writer:
                self._writer.rewind(self._step)
            self._notice(
                f"rewound to step {self._step}; the data continues at sequence {num_sequences}"
            )
        return True

    def _notice(self, what: object) -> None:
        if what is not None:
            self._observer.noticed(str(what))


def _json_number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
