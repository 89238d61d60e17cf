"""A rank's job: model, data, optimizer (what decays, place and bits of its moments), and one step of them."""

import copy
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.checkpoints.state import begin_random_numbers
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.names import CheckpointName
from ringspan.core.sharing import even_out, worth_of_sharing
from ringspan.core.step_config import StepConfig
from ringspan.measure.machine import measure_flops, peak_bytes
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.generate.cache.identity import digest_of
from ringspan.torch.mechanisms.trees.shared_rows import SharedRows
from ringspan.torch.model.adapters import base_of
from ringspan.torch.model.layers.decoder import decoder_of, text_config
from ringspan.torch.model.layers.modules import whole
from ringspan.torch.model.layers.positions import beyond_table
from ringspan.torch.model.memory.adamw import HostAdamW, RoundingAdamW
from ringspan.torch.model.memory.checkpointing import choose_checkpoint
from ringspan.torch.model.memory.gradients import (
    accumulate,
    clip_gradients,
    gradient_norm,
)
from ringspan.torch.model.view import view_of
from ringspan.torch.model.weights.loading import auto_class
from ringspan.torch.parallelize import put_on_mesh
from ringspan.torch.parts import check_options
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.torch.runtime.launch import local_device
from ringspan.torch.runtime.mesh import init_mesh
from ringspan.torch.shard_batch import shard_batch
from ringspan.train.adapter import add_adapter
from ringspan.train.config.tables import OptimizerConfig, TrainConfig
from ringspan.train.data.documents import scan_documents
from ringspan.train.data.sequences import (
    BatchOrder,
    Data,
    Sequences,
    build_data,
    build_seen,
)
from ringspan.train.guard import Guard, Verdict
from ringspan.train.metrics import StepMetrics
from ringspan.train.model import (
    Tokenizer,
    build_model,
    flops_per_token,
    load_model_config,
    load_processor,
    load_tokenizer,
    num_matmul_parameters,
)


@dataclass(kw_only=True)
class Job:
    config: TrainConfig
    device: torch.device
    mesh: DeviceMesh
    model: Any
    tokenizer: Tokenizer
    data: Data
    batches: "Batches"
    optimizer: torch.optim.Optimizer
    facts: dict[str, Any]
    step_flops: float
    # Digest of an adapter's base weights, which no checkpoint holds.
    base_digest: str | None

    def step(self, step: int, guard: Guard) -> tuple[StepMetrics, Verdict]:
        """Run an optimizer step (from 1), applied if the guard agrees; any error is raised on all ranks."""
        started = time.perf_counter()
        settings = self.config.optimizer
        rate = learning_rate(step, self.config.steps, settings)
        set_learning_rate(self.optimizer, rate)
        num_targets, parts = self.batches.step(step)
        loss = index_loss = 0.0
        micro_steps = accumulate(
            self.model, parts, settings.accumulation_steps, num_targets
        )
        for output in micro_steps:
            loss += float(output.loss.detach())
            index_loss += float(output.get("index_loss", 0.0))
        parameters = [
            parameter
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]
        total = whole(gradient_norm(parameters))
        norm = float(total)
        # Judged before clipping: a NaN factor would spoil every gradient, and hide the one that it began in.
        verdict = guard.judge(
            step, loss, norm, self.model.named_parameters(), peak_bytes(self.device)
        )
        if verdict.apply:
            if settings.clip_grad_norm:
                clip_gradients(parameters, total, settings.clip_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        metrics = StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens_per_second=self.batches.num_tokens / seconds,
            matmul_utilization=self.step_flops / seconds / self.facts["matmul_flops"],
            peak_bytes=verdict.peak_bytes,
            seconds=seconds,
            index_loss=None if settings.index_loss == "none" else index_loss,
        )
        return metrics, verdict


def prepare(
    config: TrainConfig,
    kept_tokenizer: Path | None = None,
    doing: Callable[[str], None] = lambda what: None,
) -> Job:
    """Build model, data and optimizer of a run; raise for whatever can be refused before anything is written.

    ``kept_tokenizer`` is the folder of a resumed run's tokenizer.
    """
    replicate, ring = config.resolve_mesh(dist.get_world_size())
    device, dtype = local_device(), dtype_named(config.model.dtype)
    model_config = load_model_config(config)
    mesh = init_mesh(ring=ring, replicate=replicate, tp=config.mesh.tp)
    text = text_config(model_config)
    step = config.step_config(*_checkpoint(config, text, ring, dtype))
    _refuse_early(config, model_config, mesh, step)
    doing("reading and tokenizing the text")
    with _first_rank_first():
        tokenizer, data = _text(config, model_config, kept_tokenizer)
    doing(
        "loading the model"
        if config.model.init == "pretrained"
        else "building the model"
    )
    model: Any = build_model(
        config.model,
        model_config,
        seed=config.seed,
        sees=config.data.messages is not None,
    )
    num_parameters, num_weights = (
        model.num_parameters(),
        float(num_matmul_parameters(model)),
    )
    base = model
    if (
        model := add_adapter(base, config.adapter, config.model.path, seed=config.seed)
    ) is not base:
        num_trained = model.num_parameters(only_trainable=True)
        # Frozen weights get no gradient, so they take part in two products instead of three.
        num_weights = num_trained + num_weights * 2 / 3
    else:
        num_trained = num_parameters
    # The model is still on the host, so that a device holds only its shards and one layer at a time.
    model = put_on_mesh(model.train(), mesh, step)
    settings, length = config.optimizer, config.data.sequence_length_tokens
    # Positions restart in separate documents, so their largest is known only when the model meets it.
    if config.data.documents != "separate" and (
        error := beyond_table(base, decoder_of(base), length)
    ):
        raise error
    doing("measuring how fast the ranks are")
    optimizer = build_optimizer(model, settings)
    batches = Batches(config, model, mesh, data.train, device)
    frozen = [
        parameter for parameter in model.parameters() if not parameter.requires_grad
    ]
    facts = {
        "parameters": num_parameters,
        "trained_parameters": num_trained,
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
        "matmul_flops": _matmul_flops(device, dtype),
    }
    # Last, because the measurements above draw random numbers.
    begin_random_numbers(config.seed)
    return Job(
        config=config,
        device=device,
        mesh=mesh,
        model=model,
        tokenizer=tokenizer,
        data=data,
        batches=batches,
        optimizer=optimizer,
        facts=facts,
        step_flops=flops_per_token(text, num_weights, data.train.seen_tokens)
        * batches.num_tokens,
        base_digest=digest_of(frozen, mesh) if frozen else None,
    )


def _refuse_early(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    mesh: DeviceMesh,
    step: StepConfig,
) -> None:
    """Raise for an adapter or options that do not fit the model, by a copy without weights, before text is read."""
    makes, dtype = (
        auto_class(model_config, sees=config.data.messages is not None),
        config.model.parameter_dtype,
    )
    with torch.device("meta"):
        model = makes.from_config(
            copy.deepcopy(model_config),
            dtype=dtype_named(dtype),
            trust_remote_code=config.model.trust_remote_code,
        )
        model = add_adapter(model, config.adapter, None)
    check_options(view_of(base_of(model)), mesh, step)


def _text(
    config: TrainConfig, model_config: PreTrainedConfig, kept: Path | None
) -> tuple[Tokenizer, Data]:
    if config.data.messages is not None:
        processor = load_processor(config.model, model_config, kept)
        return processor, build_seen(config, processor)
    scan = scan_documents(config.data)
    tokenizer = load_tokenizer(config.model, model_config, scan.documents, kept)
    return tokenizer, build_data(
        config, tokenizer, scan, vocabulary=text_config(model_config).vocab_size
    )


class Batches:
    """This rank's part of each step: its replica's examples, its ring's share of each."""

    def __init__(
        self,
        config: TrainConfig,
        model: torch.nn.Module,
        mesh: DeviceMesh,
        sequences: Sequences,
        device: torch.device,
    ) -> None:
        """Order the sequences of a run by its seed, for this mesh.

        ``step`` then yields this rank's part of each batch.
        """
        self._sequences, self._mesh, self._device = sequences, mesh, device
        self._model: Any = base_of(model)
        self._shares = config.data.min_shared_tokens if config.data.shared_prefix else 0
        self._split: Any = {
            "layout": config.attention.layout,
            "folds": config.memory.folds,
            "device": device,
        }
        settings, replicate = config.optimizer, mesh.get_group("replicate").size()
        self._is_balanced = config.data.balance == "flops"
        self._order = BatchOrder(
            len(sequences),
            config.seed,
            settings.batch_size,
            settings.accumulation_steps,
            replicate,
        )
        self.num_tokens = (
            self._order.global_batch_size * config.data.sequence_length_tokens
        )

    def position(self, step: int) -> int:
        return self._order.place(step)

    def seek(self, step: int, num_sequences: int) -> None:
        self._order = replace(
            self._order, shift=num_sequences - step * self._order.global_batch_size
        )

    def indices(self, step: int) -> NDArray[np.int64]:
        """Return a step's sequences (from 1): (accumulation_steps, replicate, batch_size)."""
        indices = self._order.step_indices(step - 1)
        return (
            np.take(indices, even_out(self._sequences.pairs(indices)))
            if self._is_balanced
            else indices
        )

    def describe_balance(self, steps: range) -> str | None:
        """Describe how balancing changes replicas' attention in some steps (from 1); None without balancing."""
        if not self._is_balanced or not steps:
            return None
        came = np.stack(
            [
                self._sequences.pairs(self._order.step_indices(step - 1))
                for step in steps
            ]
        )
        moved, after, before = worth_of_sharing(
            came, np.stack([even_out(work) for work in came])
        )
        return (
            f"data.balance moves {moved:.0%} of the sequences within their steps: the busiest "
            f"replica computes {after:.3f} of the mean's attention, {before:.3f} without in {len(steps)} steps"
        )

    def step(self, step: int) -> tuple[int, Iterator[dict[str, Tensor]]]:
        """Return the number of a step's targets (from 1) over all replicas, and this rank's part of each micro-step."""
        replica = self._mesh.get_local_rank("replicate")
        indices = self.indices(step)[:, replica]
        batches = [self._sequences.batch(some.tolist()) for some in indices]
        valid = torch.tensor(
            sum(int((b["shift_labels"] != IGNORED).sum()) for b in batches),
            device=self._device,
        )
        dist.all_reduce(valid, group=self._mesh.get_group("replicate"))
        return int(valid), map(self._part, batches)

    def _part(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._shares:
            return SharedRows(self._model, batch, self._shares, self._device).local
        return shard_batch(batch, self._mesh, **self._split)


def learning_rate(step: int, steps: int, settings: OptimizerConfig) -> float:
    """Compute a step's rate (from 1): linear warm-up, then half a cosine to the minimum at the last step."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    low = settings.min_learning_rate_ratio
    return settings.learning_rate * (
        low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
    )


@torch.no_grad()
def evaluate(job: Job, sequences: Sequences) -> float:
    """Compute the mean loss over held-out sequences' targets; replicas without a sequence join every collective."""
    model, mesh, device = job.model.eval(), job.mesh, job.device
    replicate, replica = (
        mesh.get_group("replicate").size(),
        mesh.get_local_rank("replicate"),
    )
    count = min(len(sequences), job.config.evaluation.num_sequences)
    total, num_targets = 0.0, 0
    for first in range(0, count, replicate):
        batch = sequences.batch([min(first + replica, count - 1)])
        if first + replica >= count:
            batch["shift_labels"].fill_(IGNORED)
        valid = (batch["shift_labels"] != IGNORED).sum().to(device)
        dist.all_reduce(valid, group=mesh.get_group("replicate"))
        split: Any = {
            "layout": job.config.attention.layout,
            "folds": job.config.memory.folds,
        }
        part = shard_batch(batch, mesh, **split, device=device)
        total += float(model(**part, num_items_in_batch=1).loss)
        num_targets += int(valid)
    model.train()
    return total / max(1, num_targets)


def _checkpoint(
    config: TrainConfig, model_config: PreTrainedConfig, ring: int, dtype: torch.dtype
) -> tuple[CheckpointName, int]:
    """Return the checkpointing of layers, and how many share a checkpoint, as configured or chosen for a memory budget.

    Compiled layers never share one, because their recomputation would run outside of the compiled programs.
    """
    memory = config.memory
    layers = (
        None if memory.layers_per_checkpoint == "auto" else memory.layers_per_checkpoint
    )
    if config.model.compile is not False:
        layers = layers or 1
    if memory.checkpoint != "auto":
        return memory.checkpoint, layers or 1
    assert memory.activation_bytes is not None, "checked by MemoryConfig"
    split = batch_layout(
        config.attention.layout, config.data.sequence_length_tokens, ring
    )
    return choose_checkpoint(
        model_config,
        -(-split.tokens_per_rank // memory.folds) * config.optimizer.batch_size,
        memory.activation_bytes,
        dtype,
        tp=config.mesh.tp,
        feedforward_in_chunks=memory.feedforward_chunk_tokens
        not in ("auto", 0),  # "auto" only under a checkpoint
        layers_per_checkpoint=layers,
    )


@contextmanager
def _first_rank_first() -> Iterator[None]:
    """Let each node's first rank run the block first, so that the others find its caches."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_first:
        dist.barrier()
    yield
    if is_first:
        dist.barrier()


def _matmul_flops(
    device: torch.device,
    dtype: torch.dtype,
    measure: Callable[[torch.device, torch.dtype], float] = measure_flops,
) -> float:
    """Measure all ranks' FLOP/s at the same time: ranks of a CPU share clock and caches."""
    dist.barrier()
    total = torch.tensor(
        measure(device, dtype),
        dtype=torch.float64 if device.type == "cpu" else torch.float32,
        device=device,
    )
    dist.all_reduce(total)
    return float(total)


def build_optimizer(
    model: PreTrainedModel, settings: OptimizerConfig
) -> torch.optim.Optimizer:
    settings.require_extras()
    groups, options = (
        _decayed(model, settings),
        {"betas": settings.betas, "eps": settings.eps},
    )
    if settings.name != "adamw":
        return _of_bitsandbytes(groups, options, settings.name)
    if settings.state != "float32":
        return _low_bit(groups, options, settings)
    if settings.on_host:
        return HostAdamW(groups, masters=settings.rounding == "master", **options)
    if settings.rounding == "stochastic":
        return RoundingAdamW(groups, **options)
    return torch.optim.AdamW(groups, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the next step's rate, which some optimizers hold in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _of_bitsandbytes(
    groups: list[dict[str, Any]], options: dict[str, Any], name: str
) -> torch.optim.Optimizer:
    optim: Any = importlib.import_module("bitsandbytes.optim")
    if name == "lion_8bit":
        return optim.Lion8bit(groups, betas=options["betas"])
    kinds = {
        "adamw_8bit": optim.AdamW8bit,
        "paged_adamw": optim.PagedAdamW,
        "paged_adamw_8bit": optim.PagedAdamW8bit,
    }
    return kinds[name](groups, **options)


def _low_bit(
    groups: list[dict[str, Any]], options: dict[str, Any], settings: OptimizerConfig
) -> torch.optim.Optimizer:
    from torchao.optim import AdamW4bit, AdamW8bit  # pyright: ignore[reportMissingImports]

    kind = AdamW8bit if settings.state == "8bit" else AdamW4bit
    return kind(
        groups, bf16_stochastic_round=settings.rounding == "stochastic", **options
    )


def _decayed(model: PreTrainedModel, settings: OptimizerConfig) -> list[dict[str, Any]]:
    # Matrices decay, and vectors do not.
    decays: dict[bool, list[Tensor]] = {
        True: [],
        False: [],
    }
    for p in model.parameters():
        if p.requires_grad:
            decays[p.ndim > 1].append(p)
    return [
        {"params": ps, "weight_decay": does * settings.weight_decay}
        for does, ps in decays.items()
        if ps
    ]
