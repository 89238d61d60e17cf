"""Tokenizer and text that a run began with, kept in its folder."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ringspan.core.errors import ConfigError
from ringspan.core.files.disk import write_synced
from ringspan.core.messages.lines import few
from ringspan.train.config.data_table import DataConfig
from ringspan.train.data.sequences import Data

TOKENIZER: Final = "tokenizer"
_DATA: Final = "data.json"
_MAX_FILES: Final = 10_000  # of which the record names each


def tokenizer_of(run: Path) -> Path | None:
    folder = run / TOKENIZER
    return folder if folder.is_dir() else None


def keep(run: Path, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, data: Data) -> None:
    scratch = run / f"{TOKENIZER}.tmp-new"
    for folder in (scratch, run / TOKENIZER):  # of a run that ended before it had begun
        shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(scratch)
    scratch.rename(run / TOKENIZER)
    _write(run, describe(data))


def describe(data: Data) -> dict[str, Any]:
    """Return the digest of a run's tokens, and facts to describe a change."""
    files = {name: list(stamp) for name, stamp in data.files.items()} if len(data.files) <= _MAX_FILES else {}
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
    except FileNotFoundError:  # begun by a version that kept no record
        _write(run, now)
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run / _DATA}: is not the record of a text ({type(error).__name__}); remove it") from error
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
    old, new = before["files"], now["files"]
    found = [
        ("changed", [name for name in old if name in new and old[name] != new[name]]),
        ("new", [name for name in new if name not in old]),
        ("gone", [name for name in old if name not in new]),
    ]
    parts = [f"{few(names, 3)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in found if names]
    counts = "{documents} documents of {tokens} tokens"
    return ", ".join([*parts, f"{counts.format_map(now)}, before {counts.format_map(before)}"])
