"""Opening a run's folder, by rank 0 for all, and the tokenizer and text that it began with."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ringspan.checkpoints.state import model_facts
from ringspan.core.errors import ConfigError
from ringspan.core.files.disk import sync_folder, write_synced
from ringspan.core.messages.lines import few, first_change
from ringspan.torch.engine.transport.collectives import from_first_rank
from ringspan.train.config.data_table import DataConfig
from ringspan.train.config.tables import TrainConfig
from ringspan.train.data.sequences import Data
from ringspan.train.model import Tokenizer
from ringspan.train.run_folder.record import (
    RECORD,
    RunLock,
    RunRecord,
    check_run,
    recorded,
    unusable,
)

TOKENIZER: Final = "tokenizer"
_DATA: Final = "data.json"
_MAX_FILES: Final = 10_000  # the record names each file, up to this number


def tokenizer_of(run: Path) -> Path | None:
    folder = run / TOKENIZER
    return folder if folder.is_dir() else None


def keep(
    run: Path, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, data: Data
) -> None:
    scratch = run / f"{TOKENIZER}.tmp-new"
    # A run that ended before its record was written may have left them.
    for folder in (scratch, run / TOKENIZER):
        shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(scratch)
    scratch.rename(run / TOKENIZER)
    _write(run, describe(data))


def describe(data: Data) -> dict[str, Any]:
    """Return the digest of a run's tokens, and facts to describe a change."""
    files = (
        {name: list(stamp) for name, stamp in data.files.items()}
        if len(data.files) <= _MAX_FILES
        else {}
    )
    return {
        "sha256": data.stream.digest(),
        "documents": data.num_documents,
        "tokens": data.num_tokens,
        "files": files,
    }


def compare(run: Path, settings: DataConfig, data: Data) -> str | None:
    """Describe the change of a run's text since its last start, and record it; None if unchanged."""
    now = describe(data)
    try:
        before = json.loads((run / _DATA).read_text(encoding="utf-8"))
        is_same, line = before["sha256"] == now["sha256"], _difference(before, now)
    except FileNotFoundError:  # the run began with a version that kept no record
        _write(run, now)
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{run / _DATA}: is not the record of a text ({type(error).__name__}); remove it"
        ) from error
    if is_same:
        return None
    if settings.on_change == "refuse":
        raise ConfigError(
            f"{run} was trained on another text: {line}; set it back, choose another folder with run=..., or go on "
            "with the new one with data.on_change=continue"
        )
    _write(run, now)
    return f"continuing with another text: {line}"


def _write(run: Path, values: dict[str, Any]) -> None:
    write_synced(run / _DATA, json.dumps(values) + "\n")


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe a run's change of text in a line: files changed, new or gone, then documents and tokens."""
    old, new = before["files"], now["files"]
    found = [
        ("changed", [name for name in old if name in new and old[name] != new[name]]),
        ("new", [name for name in new if name not in old]),
        ("gone", [name for name in old if name not in new]),
    ]
    parts = [
        f"{few(names, 3)} {'is' if len(names) == 1 else 'are'} {what}"
        for what, names in found
        if names
    ]
    counts = "{documents} documents of {tokens} tokens"
    return ", ".join(
        [*parts, f"{counts.format_map(now)}, before {counts.format_map(before)}"]
    )


def open_run(config: TrainConfig, lock: RunLock) -> RunRecord:
    """Lock ``config.run`` and find out whether it is new or resumed; collective, and errors are raised on all ranks."""

    def find() -> RunRecord:
        lock.take()
        return check_run(config)

    return from_first_rank(find)


def begin_run(
    config: TrainConfig,
    record: RunRecord,
    lock: RunLock,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    data: Data,
) -> None:
    """Create a new run's folder, or check a resumed run's text and config, on rank 0.

    Errors are raised on all ranks.
    """
    run, facts = Path(config.run), model_facts(model)

    def begin() -> None:
        run.mkdir(parents=True, exist_ok=True)
        lock.take()
        if (run / RECORD).exists():
            raise ConfigError(
                f'run = "{run}": another run has begun there meanwhile; choose another with run=...'
            )
        keep(run, tokenizer, data)
        _write_record(run, record.run_id, config, facts)

    def go_on() -> list[str]:
        written = json.loads((run / RECORD).read_text(encoding="utf-8"))
        began_with = written.get("model", facts)  # earlier versions did not record them
        if change := first_change(began_with, facts):
            raise ConfigError(
                f"{run} began with {change}; set it back, or choose another folder with run=..."
            )
        # This records the new text as the run's.
        changed = compare(run, config.data, data)
        if config.data.on_change == "continue":
            # Only the text is updated; the rest of the record stays as the run began.
            begun, _ = recorded(
                written["config"] | {"data": config.model_dump(mode="json")["data"]}
            )
            _write_record(run, record.run_id, begun, began_with)
        return [changed] if changed else []

    def work() -> list[str] | None:
        try:
            return begin() if record.is_new else go_on()
        except OSError as error:
            raise unusable(run, error) from error

    record.changes.extend(from_first_rank(work) or ())


def _write_record(
    run: Path, run_id: str, config: TrainConfig, facts: dict[str, Any]
) -> None:
    values = {
        "run_id": run_id,
        "config": config.model_dump(mode="json"),
        "model": facts,
    }
    write_synced(run / RECORD, json.dumps(values, indent=1) + "\n")
    sync_folder(run)
