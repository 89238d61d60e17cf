"""Going on: whose folder it is, what of the configuration may have changed, and what a run's state consists of."""

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ringspan.core.errors import CheckpointError, ConfigError, RingspanError
from ringspan.train.checkpoints.checkpoint import Checkpoints
from ringspan.train.checkpoints.disk import sync_folder, write_synced
from ringspan.train.checkpoints.manifest import Manifest
from ringspan.train.config.paths import refuse_missing
from ringspan.train.config.tables import TrainConfig, parse_config
from ringspan.train.data import origin
from ringspan.train.data.sequences import Data
from ringspan.train.lock import RunLock

_RECORD: Final = "run.json"
# Another value of these would be another run under the same name.
_FIXED: Final = ("seed", "model", "data")
# Which text it is, which a run may change that says so.
_TEXT: Final = ("data.paths", "data.text_field", "data.hub_split", "data.extensions")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Who a run is, as its folder says."""

    run_id: str
    is_new: bool
    changes: list[str] = field(default_factory=list)
    """Settings that differ from those it began with, as lines to show."""


def open_run(config: TrainConfig, lock: RunLock) -> RunRecord:
    """Find out whether ``config.run`` is a new run or one to go on with, and keep others out of that; nothing else is
    written. All ranks call it.

    Raises:
        ConfigError: as ``read_record``, or some of the text is not there, or the run is being trained; on every rank.
    """

    def find() -> RunRecord:
        refuse_missing(config.data.paths)
        lock.take()
        return read_record(config)

    return _on_first_rank(find)


def begin_run(
    config: TrainConfig, record: RunRecord, lock: RunLock, tokenizer: PreTrainedTokenizerBase, data: Data
) -> None:
    """Make the folder of a new run, or see whether the text is still that of one to go on with, on rank 0.

    Raises:
        ConfigError: it cannot be made, another run has begun there, or the text has changed; on every rank.
    """
    run = Path(config.run)

    def begin() -> None:
        run.mkdir(parents=True, exist_ok=True)
        lock.take()
        if (run / _RECORD).exists():
            raise ConfigError(f'run = "{run}": another run has begun there meanwhile; choose another with run=...')
        origin.keep(run, tokenizer, data)
        _write_record(run, record.run_id, config)

    def go_on() -> list[str]:
        changed = origin.compare(run, config.data, data)
        if config.data.on_change == "continue":  # from now on it is this text, wherever it is
            began = json.loads((run / _RECORD).read_text(encoding="utf-8"))["config"]
            _write_record(run, record.run_id, parse_config(began | {"data": config.model_dump(mode="json")["data"]}))
        return [changed] if changed else []

    def work() -> list[str] | None:
        try:
            return begin() if record.is_new else go_on()
        except OSError as error:
            raise _unusable(run, error) from error

    record.changes.extend(_on_first_rank(work) or ())


def _write_record(run: Path, run_id: str, config: TrainConfig) -> None:
    values = {"run_id": run_id, "config": config.model_dump(mode="json")}
    write_synced(run / _RECORD, json.dumps(values, indent=1) + "\n")
    sync_folder(run)


def _on_first_rank(work: Callable[[], Any]) -> Any:
    """What rank 0 finds, or a ConfigError in its words, on every rank."""
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


def run_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that a run goes on with, by name: parameters, buffers, and the optimizer's state of each parameter.

    A fresh optimizer gets the state that its first step would give it, so that there is something to load into.
    """
    parameters: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:  # tied weights have two names
            seen.add(id(tensor))
            parameters[name] = tensor
    tensors = {f"model/{name}": tensor for name, tensor in parameters.items()}
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            for key, value in _optimizer_state(optimizer, parameter).items():
                tensors[f"optimizer/{name}/{key}"] = value
    return tensors


def _optimizer_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, Tensor]:
    assert isinstance(optimizer, torch.optim.AdamW), "the state below is that of AdamW"
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def random_state(device: torch.device) -> dict[str, Tensor]:
    """This rank's random number generators."""
    state = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random/cuda"] = torch.cuda.get_rng_state(device)
    return state


def begin_random_numbers(*numbers: int) -> None:
    """Let random numbers begin anew, a function of these numbers and of the rank: what one rank drops from its tokens
    says nothing of what another one does.
    """
    [seed] = np.random.SeedSequence([*numbers, dist.get_rank()]).generate_state(1)
    torch.manual_seed(int(seed))


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on with the random numbers after those of ``random_state``."""
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
    """Put model, optimizer and random numbers into the state of a checkpoint that was checked.

    With another number of ranks, their random numbers begin anew, from the checkpoint's step.

    Raises:
        CheckpointError: on every rank, when the checkpoint is of another model.
    """
    tensors = run_state(model, optimizer)
    unknown = [name for name in manifest.tensors if name not in tensors and not name.startswith("rank ")]
    if unknown:
        raise CheckpointError(f"{folder}: has {unknown[0]}, which this model lacks; is it of another model?")
    same = manifest.num_ranks == dist.get_world_size()
    random = random_state(device)
    checkpoints.load(folder, manifest, tensors, random if same else None)
    if same:
        set_random_state(random, device)
    else:
        begin_random_numbers(manifest.step, dist.get_world_size())


def read_record(config: TrainConfig) -> RunRecord:
    """Whether ``config.run`` is a new run or one to go on with, as its folder says.

    Raises:
        ConfigError: the folder cannot be one of a run, holds something else, or the same run with another seed, model
            or data.
    """
    run = Path(config.run)
    try:
        there = next(path for path in (run, *run.absolute().parents) if path.exists())
    except OSError as error:
        raise _unusable(run, error) from error
    if not there.is_dir():
        raise _unusable(run, f"{there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unusable(run, f"no permission to write in {there}")
    path = run / _RECORD
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        run_id, began = values["run_id"], parse_config(values["config"])
    except FileNotFoundError:
        if (run / "metrics.jsonl").exists():
            raise ConfigError(
                f"{run} already holds a run that cannot be continued ({_RECORD} is missing); choose another with "
                "run=..., or remove it"
            ) from None
        return RunRecord(run_id=uuid.uuid4().hex, is_new=True)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not the record of a run: {' '.join(str(error).split())}; remove it") from error
    if not isinstance(run_id, str) or not run_id.isalnum():
        raise ConfigError(f"{path}: run_id = {run_id!r} is no name; remove the file")
    changes = []
    for key, before, now in _differences(began.model_dump(mode="json"), config.model_dump(mode="json")):
        if key == "data.on_change" or (key in _TEXT and config.data.on_change == "continue"):
            continue  # what that does is said when the text has been read
        if key.split(".")[0] in _FIXED:
            raise ConfigError(
                f"{run} holds a run with {key} = {json.dumps(before)}, now it is {json.dumps(now)}; choose another "
                "folder with run=..., or set it back"
                + (", or go on with another text with data.on_change=continue" if key in _TEXT else "")
            )
        if key != "run":
            changes.append(f"{key} = {json.dumps(now)} (was {json.dumps(before)})")
    return RunRecord(run_id=run_id, is_new=False, changes=changes)


def _unusable(run: Path, why: str | OSError) -> ConfigError:
    reason = why if isinstance(why, str) else why.strerror or type(why).__name__
    return ConfigError(f'run = "{run}": cannot be the folder of a run ({reason}); choose another with run=...')


def _differences(before: Any, now: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from _differences(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
    elif before != now:
        yield prefix, before, now
