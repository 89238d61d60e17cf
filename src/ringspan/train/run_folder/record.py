"""A run's folder without a framework: its record, lock and result."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from ringspan.core.errors import ConfigError
from ringspan.core.files.lock import FileLock
from ringspan.core.files.named import (
    ADAPTER_CONFIG,
    MODEL_CONFIG,
    read_small,
    why_no_folder,
)
from ringspan.core.files.weights import INDEX, WEIGHTS
from ringspan.core.messages.lines import differences
from ringspan.train.config.data_table import find_files
from ringspan.train.config.load import parse_config
from ringspan.train.config.problems import table_of
from ringspan.train.config.tables import TrainConfig

RECORD: Final = "run.json"
EXPORTED: Final = "exported"  # the step whose model has been written
_OF_MODELS: Final = (MODEL_CONFIG, ADAPTER_CONFIG, WEIGHTS, INDEX)
# Another value of these would be another run under the same name.
_FIXED: Final = ("seed", "model", "data", "adapter")
_FREE: Final = ("adapter.merge", "model.compile")  # these change no number of the run
# Keys that tell which text it is; they may change with data.on_change = "continue".
_TEXT: Final = ("data.paths", "data.text_field", "data.hub_split", "data.extensions")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    run_id: str
    is_new: bool
    config: TrainConfig
    """The requested settings; an unset warm-up is the one of the start, since its default depends on ``steps``."""
    # Lines about settings that differ from the start of the run.
    changes: list[str] = field(default_factory=list)


def read_record(config: TrainConfig) -> RunRecord:
    """Return the record of ``config.run``, new or to resume; refuse the folder of another run."""
    run = Path(config.run)
    if reason := why_no_folder(run):
        raise unusable(run, reason)
    found = _written(run)
    if found is None:
        return RunRecord(run_id=uuid.uuid4().hex, is_new=True, config=config)
    run_id, began, unknown = found
    if lost := [key for key in unknown if key.split(".")[0] in _FIXED]:
        raise ConfigError(
            f"{run} holds a run of another version of ringspan, with {lost[0]}, which this one does not know; use "
            "that version, or choose another folder with run=..."
        )
    if "warmup_steps" not in config.optimizer.model_fields_set:
        warmup = min(began.optimizer.warmup_steps, config.steps)
        config = config.model_copy(
            update={"optimizer": config.optimizer.with_warmup(warmup)}
        )
    changes = [
        f"{key} is left out: this version of ringspan does not know it"
        for key in unknown
    ]
    changes += _changes(began, config)
    return RunRecord(run_id=run_id, is_new=False, config=config, changes=changes)


def _written(run: Path) -> tuple[str, TrainConfig, list[str]] | None:
    """Read a folder's record: the run's id, its configuration and unknown keys; None if the folder is free."""
    path = run / RECORD
    try:
        values = json.loads(read_small(path))
        run_id, (began, unknown) = values["run_id"], recorded(values["config"])
    except FileNotFoundError:
        _refuse_taken(run)
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: is not the record of a run: {' '.join(str(error).split())}; remove it"
        ) from error
    if not isinstance(run_id, str) or not run_id.isalnum():
        raise ConfigError(f"{path}: run_id = {run_id!r} is no name; remove the file")
    return run_id, began, unknown


def _refuse_taken(run: Path) -> None:
    """Raise ConfigError for a folder without a record that holds the rest of a run, or a model."""
    if (run / "metrics.jsonl").exists():
        raise ConfigError(
            f"{run} already holds a run that cannot be continued ({RECORD} is missing); choose another with "
            "run=..., or remove it"
        ) from None
    if there := next((name for name in _OF_MODELS if (run / name).exists()), None):
        raise ConfigError(
            f'run = "{run}": is the folder of a model, with {there}; choose a folder of its own with run=...'
        ) from None


def _changes(began: TrainConfig, config: TrainConfig) -> Iterator[str]:
    """Yield a line about each changed setting; raise ConfigError for one that would make it another run."""
    run = Path(config.run)
    for key, before, now in differences(
        began.model_dump(mode="json"), config.model_dump(mode="json")
    ):
        if key == "data.on_change" or (
            key in _TEXT and config.data.on_change == "continue"
        ):
            continue  # reported once the text has been read
        if key.split(".")[0] in _FIXED and key not in _FREE:
            raise ConfigError(
                f"{run} holds a run with {key} = {json.dumps(before)}, now it is {json.dumps(now)}; choose another "
                "folder with run=..., or set it back"
                + (
                    ", or go on with another text with data.on_change=continue"
                    if key in _TEXT
                    else ""
                )
            )
        if key != "run":
            yield f"{key} = {json.dumps(now)} (the run began with {json.dumps(before)})"


def recorded(values: object) -> tuple[TrainConfig, list[str]]:
    """Return the configuration that a run began with and its unknown keys; ConfigError if invalid."""
    unknown: list[str] = []
    return parse_config(_known(values, TrainConfig, "", unknown)), unknown


def _known(
    values: object, table: type[BaseModel], prefix: str, unknown: list[str]
) -> Any:
    if not isinstance(values, dict):
        return values
    kept = {}
    for key, value in values.items():
        field = table.model_fields.get(key)
        if field is None:
            unknown.append(prefix + key)
            continue
        inner = table_of(field)
        kept[key] = (
            value if inner is None else _known(value, inner, f"{prefix}{key}.", unknown)
        )
    return kept


def check_run(config: TrainConfig) -> RunRecord:
    """Raise ConfigError for missing packages or text, and for an unusable or finished run, without a framework.

    The command asks before ranks start, and rank 0 again under its lock: another run may have taken the folder by then.
    """
    config.require_extras()
    find_files(config.data)
    record = read_record(config)
    _refuse_finished(config)
    return record


def _refuse_finished(config: TrainConfig) -> None:
    run = Path(config.run)
    try:
        step = int(read_small(run / EXPORTED))
    except (OSError, ValueError):
        return
    is_there = (run / "model").exists() and (
        run / "checkpoints" / f"step_{step:08d}"
    ).is_dir()
    if is_there and step >= config.steps:
        raise finished(config, step)


def finished(config: TrainConfig, step: int) -> ConfigError:
    return ConfigError(
        f"{config.run} is finished at step {step}; set steps above {step} to go on (it is {config.steps}), or choose "
        "another folder with run=..."
    )


def unusable(run: Path, why: str | OSError) -> ConfigError:
    reason = why if isinstance(why, str) else why.strerror or type(why).__name__
    return ConfigError(
        f'run = "{run}": cannot be the folder of a run ({reason}); choose another with run=...'
    )


class RunLock(FileLock):
    """Lock of rank 0 on the run's folder, until the run ends."""

    def __init__(self, run: Path) -> None:
        remedy = "wait for it, or choose another with run=..."
        super().__init__(run / "lock", f'run = "{run}": is being trained by', remedy)


@dataclass
class TrainResult:
    run: str
    model: str
    steps: int
    loss: float
    eval_loss: float | None
    facts: dict[str, Any] = field(default_factory=dict)
    # the signal that ended the run early; starting it again resumes it
    stopped_by: str | None = None
