"""The training loop, as every rank runs it inside its process group."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.core.layout import Layout, LayoutName
from ringspan.plan.profile import Profiler, gathered
from ringspan.torch.batch import IGNORED, shard_batch
from ringspan.torch.launch import local_device
from ringspan.torch.mesh import init_mesh
from ringspan.torch.models import parallelize
from ringspan.torch.remat import CheckpointName, choose_checkpoint
from ringspan.train.checkpoint import Checkpoints
from ringspan.train.config import OptimizerConfig, TrainConfig
from ringspan.train.data import BatchOrder, Data, TokenSequences, build_data
from ringspan.train.export import save_model
from ringspan.train.guard import Guard, Verdict
from ringspan.train.manifest import Manifest
from ringspan.train.metrics import MetricsWriter, StepMetrics, measure_flops, peak_bytes
from ringspan.train.model import build_model, flops_per_token, load_model_config, load_tokenizer, num_matmul_parameters
from ringspan.train.optimizer import build_optimizer, set_learning_rate
from ringspan.train.resume import RunRecord, begin_run, open_run, random_state, restore, run_state
from ringspan.train.signals import StopRequest
from ringspan.train.watchdog import Watchdog


@dataclass
class Observer:
    """Who is told how a run goes, on rank 0: a progress bar, or nobody."""

    started: Callable[[dict[str, Any]], None] = lambda facts: None
    stepped: Callable[[StepMetrics], None] = lambda metrics: None
    evaluated: Callable[[int, float], None] = lambda step, loss: None
    noticed: Callable[[str], None] = lambda line: None


@dataclass
class TrainResult:
    """What a finished run leaves: its folder, the last losses and what it was made of."""

    run: str
    model: str
    steps: int
    loss: float
    eval_loss: float | None
    facts: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None
    """The signal that ended the run early; it goes on when it is started again."""


def train(config: TrainConfig, observer: Observer | None = None) -> TrainResult:
    """Train as configured and save the model to ``<run>/model``; every rank of the process group calls it.

    The loss of a step is the sum over all its valid targets, on all ranks, replicas and micro-steps, over their count.
    A run that is there already goes on from its newest valid checkpoint. A stop signal to any rank ends all of them
    after the same step, saved.

    Raises:
        RingspanError: anything in the config, data or model that is refused; before the run's folder is made.
        Diverged: a loss or gradient that is not finite; no rank has applied it.
        CheckpointError: no checkpoint of the run is valid, or the last one could not be written.
    """
    observer = observer or Observer()
    record = open_run(config)
    job = _prepare(config)
    begin_run(config, record)
    run = Path(config.run)
    with StopRequest() as stop, Watchdog(config.watchdog, run / "watchdog") as watchdog:
        return _Run(job, record, stop, watchdog, observer).train()


class _Run:
    """The steps of a run and what happens between them; only rank 0 writes and tells the observer."""

    def __init__(
        self, job: "_Job", record: RunRecord, stop: StopRequest, watchdog: Watchdog, observer: Observer
    ) -> None:
        self._job, self._config, self._record = job, job.config, record
        self._stop, self._watchdog, self._observer = stop, watchdog, observer
        self._folder = Path(job.config.run)
        self._guard = Guard(job.config.guard, stop, job.device)
        settings = job.config.checkpoints
        self._checkpoints = Checkpoints(
            self._folder / "checkpoints",
            run_id=record.run_id,
            keep=settings.keep,
            asynchronous=settings.asynchronous,
        )
        self._step, self._loss, self._eval_loss = 0, math.nan, None
        self._profile = self._folder / "profile"
        self._profiler = None
        if job.config.profile:
            self._profile.mkdir(exist_ok=True)
            rank = dist.get_rank()
            self._profiler = Profiler(job.model, job.optimizer, rank, self._profile / f"snapshot-{rank}.pickle")

    def train(self) -> TrainResult:
        """All steps that are left, and the model."""
        with self._watchdog.doing("resuming"):
            self._resume()
        self._writer = MetricsWriter(self._folder, self._step) if dist.get_rank() == 0 else None
        if self._writer:
            self._observer.started(self._job.facts)
        stopped = False
        try:
            while self._step < self._config.steps and not stopped:
                stopped = self._one_step()
            with self._watchdog.doing("saving"):
                self._notice(self._checkpoints.wait())
                model = self._folder / "model"
                if not stopped:
                    save_model(self._job.model, self._job.tokenizer, model, getattr(torch, self._config.model.dtype))
        finally:
            if self._writer:
                self._writer.close()
        self._checkpoints.close()
        return TrainResult(
            str(self._folder),
            str(model),
            self._step,
            self._loss,
            self._eval_loss,
            self._job.facts,
            (self._stop.signal_name or "a signal to another rank") if stopped else None,
        )

    def _one_step(self) -> bool:
        """A step, its evaluation and its checkpoint where they are due; whether all ranks stop here."""
        self._step += 1
        self._watchdog.step(self._step)
        with self._profiler.step() if self._profiler else nullcontext():
            metrics, verdict = self._job.step(self._step, self._guard)
        if self._profiler and self._profiler.result:
            self._write_profile(self._profiler)
            self._profiler = None
        self._notice(verdict.problem)
        if verdict.rewind and self._rewind():
            return False
        self._loss = metrics.loss
        if self._writer:
            self._writer.step(metrics)
            self._observer.stepped(metrics)
        is_last = self._step == self._config.steps
        every = self._config.evaluation.every_steps
        if self._job.data.eval is not None and (is_last or (every and self._step % every == 0)):
            with self._watchdog.doing("evaluation"):
                self._evaluate(self._job.data.eval)
        every = self._config.checkpoints.every_steps
        if verdict.stop or (every and (is_last or self._step % every == 0)):
            self._save(wait=verdict.stop)
        self._notice(self._checkpoints.poll())
        return verdict.stop and not is_last

    def _write_profile(self, profiler: Profiler) -> None:
        """The pictures of the profiled steps, on rank 0."""
        with self._watchdog.doing("drawing the profile"):
            profiles = gathered(profiler)
            if dist.get_rank() == 0:
                from ringspan.plan.report import write_report  # plotly takes a second, and few runs are profiled

                mesh = " x ".join(f"{axis} {self._job.mesh[axis].size()}" for axis in ("replicate", "ring"))
                title = f"{self._config.run}: {self._config.data.sequence_length_tokens:,} tokens, {mesh}"
                self._notice(f"profile  {write_report(profiles, self._profile, title)[0]}")

    def _evaluate(self, sequences: TokenSequences) -> None:
        self._eval_loss = evaluate(self._job.model, self._job.mesh, sequences, self._config, self._job.device)
        if self._writer:
            self._writer.evaluation(self._step, self._eval_loss)
            self._observer.evaluated(self._step, self._eval_loss)

    def _save(self, *, wait: bool) -> None:
        job = self._job
        state = {
            "num_sequences": job.batches.position(self._step),
            "guard": self._guard.state(),
            "loss": _json_number(self._loss),
            "eval_loss": _json_number(self._eval_loss),
        }
        with self._watchdog.doing("saving"):
            error = self._checkpoints.save(
                self._step,
                run_state(job.model, job.optimizer),
                random_state(job.device),
                state,
                mesh={axis: job.mesh[axis].size() for axis in job.mesh.mesh_dim_names or ()},
                layout=self._config.attention.layout,
            )
            self._notice(error)
            if wait:
                error = self._checkpoints.wait()
                if error is not None:
                    raise error

    def _resume(self) -> None:
        """Go on from the newest valid checkpoint, and say what was passed over.

        Raises:
            CheckpointError: there are checkpoints, and none is valid.
            ConfigError: the run is finished.
        """
        if self._record.is_new:
            return
        found = self._checkpoints.find()
        for line in (*(f"skipped {line}" for line in found.skipped), *self._record.changes):
            self._notice(line)
        if found.folder is None or found.manifest is None:
            if found.skipped:
                raise CheckpointError(
                    f"no checkpoint in {self._checkpoints.folder} is valid; remove the folder to begin anew. "
                    + "; ".join(found.skipped)
                )
            self._notice(f"{self._folder} has no checkpoint yet: begins anew")
            return
        if found.manifest.step >= self._config.steps and (self._folder / "model").exists():
            raise ConfigError(
                f"{self._folder} is finished at step {found.manifest.step}; raise steps = {self._config.steps} to go "
                "on, or choose another folder with run=..."
            )
        self._restore(found.folder, found.manifest)
        self._step = found.manifest.step
        self._job.batches.seek(self._step, found.manifest.state["num_sequences"])
        self._notice(
            f"goes on after step {self._step} from {found.folder} (saved on "
            + " x ".join(f"{axis} {size}" for axis, size in found.manifest.mesh.items())
            + ")"
        )

    def _restore(self, folder: Path, manifest: Manifest) -> None:
        job, state = self._job, manifest.state
        restore(self._checkpoints, folder, manifest, job.model, job.optimizer, job.device)
        self._guard.restore(state["guard"])
        self._loss = math.nan if state["loss"] is None else state["loss"]
        self._eval_loss = state["eval_loss"]

    def _rewind(self) -> bool:
        """Go back to the newest checkpoint and on with the data after this step; False where there is none."""
        with self._watchdog.doing("rewinding"):
            self._notice(self._checkpoints.wait())
            found = self._checkpoints.find()
            if found.folder is None or found.manifest is None:
                self._notice(f"step {self._step}: there is no checkpoint to rewind to; skipped")
                return False
            num_sequences = self._job.batches.position(self._step)
            self._restore(found.folder, found.manifest)
            self._step = found.manifest.step
            self._job.batches.seek(self._step, num_sequences)
            if self._writer:
                self._writer.rewind(self._step)
            self._notice(f"rewound to step {self._step}; the data goes on at sequence {num_sequences}")
        return True

    def _notice(self, what: object) -> None:
        if what is not None and dist.get_rank() == 0:
            self._observer.noticed(str(what))


def _json_number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(kw_only=True)
class _Job:
    """One rank's model, data and optimizer, ready to step."""

    config: TrainConfig
    device: torch.device
    mesh: DeviceMesh
    model: Any
    tokenizer: PreTrainedTokenizerBase
    data: Data
    batches: "Batches"
    optimizer: torch.optim.Optimizer
    facts: dict[str, Any]
    step_flops: float

    def step(self, step: int, guard: Guard) -> tuple[StepMetrics, Verdict]:
        """One optimizer step over the whole batch (steps count from 1), applied only if the guard says so.

        Raises:
            Diverged: the loss or the gradient is not finite, on every rank alike; the weights are untouched.
        """
        started = time.perf_counter()
        settings = self.config.optimizer
        rate = learning_rate(step, self.config.steps, settings)
        set_learning_rate(self.optimizer, rate)
        num_targets, parts = self.batches.step(step)
        loss = 0.0
        for number, part in enumerate(parts, start=1):
            self.model.set_requires_all_reduce(number == settings.accumulation_steps)  # over replicas, once a step
            micro = self.model(**part, num_items_in_batch=num_targets).loss
            micro.backward()
            loss += float(micro.detach())
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        total = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        # Judged before it is clipped: a factor of NaN would spoil every gradient, and hide the one that began it.
        verdict = guard.judge(step, loss, norm, self.model.named_parameters(), peak_bytes(self.device))
        if verdict.apply:
            if settings.clip_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, settings.clip_grad_norm, total)
            self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        metrics = StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens_per_second=self.batches.num_tokens / seconds,
            mfu=self.step_flops / seconds / self.facts["peak_flops"],
            peak_bytes=verdict.peak_bytes,
            seconds=seconds,
        )
        return metrics, verdict


def _prepare(config: TrainConfig) -> _Job:
    """Everything that can be refused is refused here, before anything is written."""
    replicate, ring = config.resolve_mesh(dist.get_world_size())
    device, dtype = local_device(), getattr(torch, config.model.dtype)
    model_config = load_model_config(config)
    with _first_rank_first():
        tokenizer = load_tokenizer(config, model_config)
        data = build_data(config, tokenizer)
    model: Any = build_model(config, model_config)
    num_parameters, num_weights = model.num_parameters(), num_matmul_parameters(model)
    mesh = init_mesh(ring=ring, replicate=replicate, tp=config.mesh.tp)
    checkpoint, layers_per_checkpoint = _checkpoint(config, model_config, ring, dtype)
    model = parallelize(
        model.to(device).train(),
        mesh,
        layout=config.attention.layout,
        route=config.attention.route,
        wire=config.attention.wire,
        kernel=config.attention.kernel,
        checkpoint=checkpoint,
        layers_per_checkpoint=layers_per_checkpoint,
        loss_chunk_tokens=config.memory.loss_chunk_tokens,
        loss_chunk_vocabulary=config.memory.loss_chunk_vocabulary,
        z_loss=config.optimizer.z_loss,
        label_smoothing=config.optimizer.label_smoothing,
        feedforward_chunk_tokens=config.memory.feedforward_chunk_tokens,
        norm_chunk_tokens=config.memory.norm_chunk_tokens,
        offload=config.memory.offload,
        compute_dtype=dtype,
    )
    settings, length = config.optimizer, config.data.sequence_length_tokens
    optimizer = build_optimizer(model, settings)
    batches = Batches(config, mesh, data.train, device)
    facts = {
        "parameters": num_parameters,
        "ranks": dist.get_world_size(),
        "replicate": replicate,
        "ring": ring,
        "tp": config.mesh.tp,
        "sequence_length_tokens": length,
        "tokens_per_step": batches.num_tokens,
        "documents": data.num_documents,
        "tokens": data.num_tokens,
        "skipped_files": data.num_skipped_files,
        "train_sequences": len(data.train),
        "eval_sequences": len(data.eval or ()),
        "peak_flops": _sum_over_ranks(measure_flops(device, dtype), device),
    }
    return _Job(
        config=config,
        device=device,
        mesh=mesh,
        model=model,
        tokenizer=tokenizer,
        data=data,
        batches=batches,
        optimizer=optimizer,
        facts=facts,
        step_flops=flops_per_token(model_config, num_weights, length) * batches.num_tokens,
    )


class Batches:
    """The parts of each step that this rank works on: its replica's examples, its ring's share of each."""

    def __init__(self, config: TrainConfig, mesh: DeviceMesh, sequences: TokenSequences, device: torch.device) -> None:
        self._sequences, self._mesh, self._device = sequences, mesh, device
        self._layout: LayoutName = config.attention.layout
        settings, replicate = config.optimizer, mesh["replicate"].size()
        self._micro_steps = settings.accumulation_steps
        self._order = BatchOrder(
            len(sequences), config.seed, settings.batch_size, settings.accumulation_steps, replicate
        )
        self.num_tokens = self._order.global_batch_size * config.data.sequence_length_tokens

    def position(self, step: int) -> int:
        """Sequences of the data that the steps up to this one have taken, whatever the number of ranks."""
        return self._order.place(step)

    def seek(self, step: int, num_sequences: int) -> None:
        """Let the step after this one take what comes after so many sequences."""
        self._order = replace(self._order, shift=num_sequences - step * self._order.global_batch_size)

    def step(self, step: int) -> tuple[int, Iterator[dict[str, Tensor]]]:
        """Valid targets of a whole step (from 1), and this rank's part of each of its micro-steps."""
        replica = self._mesh["replicate"].get_local_rank()
        whole = [
            collate(self._sequences, self._order.indices(step - 1, micro, replica))
            for micro in range(self._micro_steps)
        ]
        valid = torch.tensor(sum(int((b["shift_labels"] != IGNORED).sum()) for b in whole), device=self._device)
        dist.all_reduce(valid, group=self._mesh["replicate"].get_group())
        parts = (shard_batch(b, self._mesh, layout=self._layout, device=self._device) for b in whole)
        return int(valid), parts


def collate(sequences: TokenSequences, indices: list[int]) -> dict[str, Tensor]:
    """Some sequences as one whole batch (B, S)."""
    rows = [sequences[index] for index in indices]
    return {name: torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in rows[0]}


def learning_rate(step: int, steps: int, settings: OptimizerConfig) -> float:
    """Rate of a step (from 1): linear warm-up to the highest, then half a cosine down to the smallest at the last
    step.
    """
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    low = settings.min_learning_rate_ratio
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def evaluate(
    model: Any, mesh: DeviceMesh, sequences: TokenSequences, config: TrainConfig, device: torch.device
) -> float:
    """Loss over the first held-out sequences: the sum over their valid targets over their count.

    Replicas share the work; where it does not come out even, some run an example without targets, so that all ranks
    take part in every exchange.
    """
    model.eval()
    replicate, replica = mesh["replicate"].size(), mesh["replicate"].get_local_rank()
    count = min(len(sequences), config.evaluation.num_sequences)
    total, num_targets = 0.0, 0
    for first in range(0, count, replicate):
        whole = collate(sequences, [min(first + replica, count - 1)])
        if first + replica >= count:
            whole["shift_labels"].fill_(IGNORED)
        valid = (whole["shift_labels"] != IGNORED).sum().to(device)
        dist.all_reduce(valid, group=mesh["replicate"].get_group())
        part = shard_batch(whole, mesh, layout=config.attention.layout, device=device)
        total += float(model(**part, num_items_in_batch=1).loss)
        num_targets += int(valid)
    model.reshard()  # the root's parameters stay whole after a forward pass without a backward
    model.train()
    return total / max(1, num_targets)


def _checkpoint(config: TrainConfig, model_config: Any, ring: int, dtype: torch.dtype) -> tuple[CheckpointName, int]:
    """The policy for activations and the layers that share an input, with "auto" resolved."""
    memory = config.memory
    layers = None if memory.layers_per_checkpoint == "auto" else memory.layers_per_checkpoint
    if memory.checkpoint != "auto":
        return memory.checkpoint, layers or 1
    assert memory.activation_bytes is not None, "checked by MemoryConfig"
    split = Layout(config.attention.layout, config.data.sequence_length_tokens, ring)
    return choose_checkpoint(
        model_config,
        split.tokens_per_rank * config.optimizer.batch_size,
        memory.activation_bytes,
        dtype,
        tp=config.mesh.tp,
        feedforward_in_chunks=memory.feedforward_chunk_tokens not in ("auto", 0),  # "auto" only under a checkpoint
        layers_per_checkpoint=layers,
    )


@contextmanager
def _first_rank_first() -> Iterator[None]:
    """The first rank of each node goes through the block before the others, who then find its caches."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_first:
        dist.barrier()
    yield
    if is_first:
        dist.barrier()


def _sum_over_ranks(value: float, device: torch.device) -> float:
    total = torch.tensor(value, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    dist.all_reduce(total)
    return float(total)
