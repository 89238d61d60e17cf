"""Opening a run's folder, by rank 0 for all."""

import json
from pathlib import Path
from typing import Any

from ringspan.checkpoints.state import model_facts
from ringspan.core.errors import ConfigError
from ringspan.core.files.disk import sync_folder, write_synced
from ringspan.core.messages.changes import first_change
from ringspan.torch.transport.collectives import from_first_rank
from ringspan.train.config.tables import TrainConfig
from ringspan.train.data import origin
from ringspan.train.data.sequences import Data
from ringspan.train.model import Tokenizer
from ringspan.train.run_folder.record import RECORD, RunLock, RunRecord, check_run, recorded, unusable


def open_run(config: TrainConfig, lock: RunLock) -> RunRecord:
    """Find out if ``config.run`` is new or resumed, and lock it; all ranks call it, errors are all ranks'."""

    def find() -> RunRecord:
        lock.take()
        return check_run(config)

    return from_first_rank(find)


def begin_run(
    config: TrainConfig, record: RunRecord, lock: RunLock, model: Any, tokenizer: Tokenizer, data: Data
) -> None:
    """Make a new run's folder, or check a resumed one's text and config, on rank 0; errors are all ranks'."""
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

    record.changes.extend(from_first_rank(work) or ())


def _write_record(run: Path, run_id: str, config: TrainConfig, facts: dict[str, Any]) -> None:
    values = {"run_id": run_id, "config": config.model_dump(mode="json"), "model": facts}
    write_synced(run / RECORD, json.dumps(values, indent=1) + "\n")
    sync_folder(run)
