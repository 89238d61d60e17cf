"""Results item by item in a file that a killed run continues."""

import hashlib
import json
import os
import platform
from collections.abc import Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.core.files.lock import FileLock
from ringspan.evaluate.settings import EvalSettings
from ringspan.generate.folder import base_folder

VERSION: Final = 1
"""Of prompts, documents and scores: raise it when they change, so that old items are not continued with new ones."""
_SMALL_BYTES: Final = 1 << 20
# Of the settings, what changes no answer, is in an item's key, or is described below.
_LEFT_OUT: Final = {"tp", "weights", "prefill_tokens", "lengths", "depths", "items", "folder", "text"}


def identity(settings: EvalSettings) -> dict[str, Any]:
    """What the answers depend on besides the model: the settings, how prompts are made, and the text, which is Python's
    own unless there are files.
    """
    kept = {name: value for name, value in asdict(settings).items() if name not in _LEFT_OUT}
    text = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in settings.text]
    return {**kept, "text": text or platform.python_version()}


def records_file(out: Path, task: str, model: str, facts: dict[str, Any]) -> Path:
    """Where the records of a task are: another file for other facts, and other files of the model, or of the one that
    an adapter is for.
    """
    known = json.dumps({**facts, "version": VERSION, "model": _model(model)}, sort_keys=True)
    digest = hashlib.sha256(known.encode()).hexdigest()[:12]
    return out / f"{task}-{Path(model).resolve().name}-{digest}.jsonl"


def _model(folder: str) -> list[dict[str, str]]:
    folders = dict.fromkeys((folder, base_folder(folder)))
    return [{path.name: _describe(path) for path in sorted(Path(each).iterdir()) if _matters(path)} for each in folders]


def _matters(path: Path) -> bool:
    return path.is_file() and path.suffix in (".json", ".safetensors", ".jinja", ".model", ".txt")


def _describe(path: Path) -> str:
    """Small files by what is in them; the weights by size and time, which is as good and takes no minutes."""
    facts = path.stat()
    if facts.st_size <= _SMALL_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{facts.st_size} bytes of {facts.st_mtime_ns}"


class Records:
    """A line of JSON per item, appended when it is done; a line that was cut off is dropped. One writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        remedy = "wait for it, or give another folder with --out"
        self.lock = FileLock(path.with_suffix(".lock"), f"{path}: is being written by", remedy)
        self.by_key: dict[Hashable, dict[str, Any]] = {}

    def load(self) -> None:
        """Read what an earlier run has done, and keep other processes out of the file.

        Raises:
            ConfigError: the file cannot be read or made, or another process writes it.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.lock.take()
            data = self.path.read_bytes() if self.path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(self.path, len(whole))
            for line in whole.splitlines():
                record = json.loads(line)
                self.by_key[tuple(record["key"])] = record
        except ConfigError:  # a ValueError, too
            raise
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path}: is damaged; delete it to begin again") from error

    def add(self, record: dict[str, Any]) -> None:
        """Append a record, on the disk before this returns."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(self.path)  # which a write does not know
            raise
        self.by_key[tuple(record["key"])] = record
