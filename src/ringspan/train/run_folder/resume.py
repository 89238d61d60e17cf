"""Resuming: opening the folder of a run, and the state of a run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringspan.core.errors import CheckpointError, ConfigError, RingspanError
from ringspan.core.files.disk import sync_folder, write_synced
from ringspan.torch.model.config_changes import deciding_fields
from ringspan.train.checkpoints.checkpoint import Checkpoints
from ringspan.train.checkpoints.manifest import Manifest
from ringspan.train.checkpoints.shards import Part
from ringspan.train.config.paths import refuse_missing
from ringspan.train.config.tables import TrainConfig
from ringspan.train.data import origin
from ringspan.train.data.sequences import Data
from ringspan.train.model import Tokenizer
from ringspan.train.run_folder.lock import RunLock
from ringspan.train.run_folder.record import RECORD, RunRecord, differences, read_record, recorded, unusable


def open_run(config: TrainConfig, lock: RunLock) -> RunRecord:
    """Find out if ``config.run`` is new or to be resumed, and lock it; write nothing else. All ranks call it.

    Raises:
        ConfigError: as ``read_record``, or text is missing, or the run is being trained; on all ranks.
    """

    def find() -> RunRecord:
        refuse_missing(config.data.paths)
        lock.take()
        return read_record(config)

    return _on_first_rank(find)


def begin_run(
    config: TrainConfig, record: RunRecord, lock: RunLock, model: Any, tokenizer: Tokenizer, data: Data
) -> None:
    """Make the folder of a new run, or check the text and the model's config of a resumed one, on rank 0.

    Raises:
        ConfigError: it cannot be made, another run has begun there, or text or config has changed; on all ranks.
    """
    run, facts = Path(config.run), model_facts(model)

    def begin() -> None:
        run.mkdir(parents=True, exist_ok=True)
        lock.take()
        if (run / RECORD).exists():
            raise ConfigError(f'run = "{run}": another run has begun there meanwhile; choose another with run=...')
        origin.keep(run, tokenizer, data)
        _write_record(run, record.run_id, config, facts)

    def go_on() -> list[str]:
        written = json.loads((run / RECORD).read_text(encoding="utf-8"))
        began_with = written.get("model", facts)  # earlier versions kept none
        if change := first_change(began_with, facts):
            raise ConfigError(f"{run} began with {change}; set it back, or choose another folder with run=...")
        changed = origin.compare(run, config.data, data)
        if config.data.on_change == "continue":  # from now on it is this text, wherever it is
            # Only the text: what else the run began with still holds.
            begun, _ = recorded(written["config"] | {"data": config.model_dump(mode="json")["data"]})
            _write_record(run, record.run_id, begun, began_with)
        return [changed] if changed else []

    def work() -> list[str] | None:
        try:
            return begin() if record.is_new else go_on()
        except OSError as error:
            raise unusable(run, error) from error

    record.changes.extend(_on_first_rank(work) or ())


def _write_record(run: Path, run_id: str, config: TrainConfig, facts: dict[str, Any]) -> None:
    values = {"run_id": run_id, "config": config.model_dump(mode="json"), "model": facts}
    write_synced(run / RECORD, json.dumps(values, indent=1) + "\n")
    sync_folder(run)


def model_facts(model: Any) -> dict[str, Any]:
    """Collect the facts in the model's other files that a run depends on, as JSON."""
    files = {"config.json": model.config, "generation_config.json": getattr(model, "generation_config", None)}
    facts = {name: deciding_fields(config) for name, config in files.items() if config is not None}
    return {"transformers": transformers.__version__, **facts}


def first_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first changed field with both values, or None; skip fields of only one transformers release."""
    same_release = before["transformers"] == now["transformers"]
    for name in before.keys() & now.keys() - {"transformers"}:
        for field, old, new in differences(before[name], now[name]):
            if same_release or None not in (old, new):
                return f"{field} = {json.dumps(old)} in the model's {name}, where it is {json.dumps(new)} now"
    return None


def _on_first_rank(work: Callable[[], Any]) -> Any:
    """Return rank 0's result, or raise its ConfigError, on every rank."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [work(), None]
        except RingspanError as error:
            answer = [None, str(error)]
    dist.broadcast_object_list(answer)
    found, refusal = answer
    if refusal is not None:
        raise ConfigError(refusal)
    return found


def run_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | Part]:
    """Collect the tensors to resume from: trained parameters, buffers, optimizer state. Frozen ones are in the folder.

    A fresh optimizer gets the state of its first step, so that there is something to load into; tensors in host memory
    are parts of one that is split like its weight.
    """
    _make_state(optimizer)
    parameters: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if id(tensor) not in seen and not is_frozen:  # tied weights have two names
            seen.add(id(tensor))
            parameters[name] = tensor
    tensors: dict[str, Tensor | Part] = {f"model/{name}": tensor for name, tensor in parameters.items()}
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            for key, value in optimizer.state[parameter].items():
                # A step count is one number, the same on every rank; what has dimensions is as split as its weight.
                is_split = isinstance(parameter, DTensor) and value.ndim > 0
                is_part = is_split and not isinstance(value, DTensor)
                tensors[f"optimizer/{name}/{key}"] = Part(value, cast(DTensor, parameter)) if is_part else value
    return tensors


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state by a step at rate 0: it alone knows the place and bits of its moments."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    # Those that have a state keep it: this is called for running optimizers too.
    fresh = [p for p in parameters if p.requires_grad and not optimizer.state[p]]
    if not fresh:
        return
    for p in parameters:
        p.grad = None
    for p in fresh:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for p in fresh:
        if "step" in optimizer.state[p]:
            optimizer.state[p]["step"].zero_()
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random/cuda"] = torch.cuda.get_rng_state(device)
    return state


def begin_random_numbers(*numbers: int) -> None:
    """Seed the generators from these numbers and the rank, so that ranks drop tokens independently."""
    [seed] = np.random.SeedSequence([*numbers, dist.get_rank()]).generate_state(1)
    torch.manual_seed(int(seed))


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the generators from ``random_state``."""
    torch.set_rng_state(state["random/cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["random/cuda"], device)


def restore(
    checkpoints: Checkpoints,
    folder: Path,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Restore model, optimizer and random numbers from a checked checkpoint.

    On another number of ranks, random numbers are seeded anew from the checkpoint's step.

    Raises:
        CheckpointError: on all ranks, if the checkpoint is of another model.
    """
    tensors = run_state(model, optimizer)
    # What a checkpoint has and the model lacks would be lost without a word. (Each rank's own tensors are named so.)
    unknown = [name for name in manifest.tensors if name not in tensors and not name.startswith("rank ")]
    if unknown:
        raise CheckpointError(
            f"{folder}: has {unknown[0]}, which this model lacks; is it of another model? use its own"
        )
    same = manifest.num_ranks == dist.get_world_size()
    random = random_state(device)
    checkpoints.load(folder, manifest, tensors, random if same else None)
    if same:
        set_random_state(random, device)
    else:
        begin_random_numbers(manifest.step, dist.get_world_size())
