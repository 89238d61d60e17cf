"""Results item by item in a file, from where a killed run continues."""

import hashlib
import json
import os
import platform
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from ringspan.core.errors import ConfigError
from ringspan.core.files.lock import FileLock
from ringspan.evaluate.settings import EvalSettings
from ringspan.generate.folder import base_folder
from ringspan.torch.engine.transport.collectives import from_first_rank

VERSION: Final = 1
"""Version of prompts, documents and scores: raise it on a change, so that old items are not mixed with new ones."""
_SMALL_BYTES: Final = 1 << 20
_READ: Final = (".json", ".safetensors", ".jinja", ".model", ".txt")
# Settings that do not change an answer, are in an item's key, or are described another way below.
_LEFT_OUT: Final = {
    "tp",
    "weights",
    "prefill_tokens",
    "lengths",
    "depths",
    "items",
    "folder",
    "text",
}


def identity(settings: EvalSettings) -> dict[str, Any]:
    """Return the answers' inputs besides the model: settings, prompt version, and text (Python's own by default)."""
    kept = {
        name: value for name, value in asdict(settings).items() if name not in _LEFT_OUT
    }
    text = [
        hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in settings.text
    ]
    return {**kept, "text": text or platform.python_version()}


def records_file(out: Path, task: str, model: str, facts: dict[str, Any]) -> Path:
    """Return a task's file of records, whose name has a digest of ``facts`` and of the files of model and base."""
    known = json.dumps(
        {**facts, "version": VERSION, "model": _model(model)}, sort_keys=True
    )
    digest = hashlib.sha256(known.encode()).hexdigest()[:12]
    return out / f"{task}-{Path(model).resolve().name}-{digest}.jsonl"


def _model(folder: str) -> list[dict[str, str]]:
    folders = (Path(each) for each in dict.fromkeys((folder, base_folder(folder))))
    files = (
        sorted(
            path for path in each.iterdir() if path.is_file() and path.suffix in _READ
        )
        for each in folders
    )
    return [{path.name: _describe(path) for path in each} for each in files]


def _describe(path: Path) -> str:
    """Describe small files by content; weights by size and time, which is as good and fast."""
    facts = path.stat()
    if facts.st_size <= _SMALL_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{facts.st_size} bytes of {facts.st_mtime_ns}"


class Records:
    """A JSON line per item, appended when it is done; a truncated line is dropped. One process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        remedy = "wait for it, or give another folder with --out"
        self.lock = FileLock(
            path.with_suffix(".lock"), f"{path}: is being written by", remedy
        )
        self.by_key: dict[Hashable, dict[str, Any]] = {}

    def load(self) -> None:
        """Read an earlier run's records and lock the file; raise ConfigError if it is unusable or locked."""
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
        except ConfigError:  # it is a ValueError too, so it must come first
            raise
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.path}: is damaged; delete it to begin again"
            ) from error

    def add(self, record: dict[str, Any]) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(self.path)  # an error of write has no file name
            raise
        self.by_key[tuple(record["key"])] = record


class Answers:
    """A file of answers on the first rank, shared with all (lm-eval's cache is per process); an error raises on all."""

    def __init__(self, path: Path) -> None:
        self._records = Records(path)
        from_first_rank(self._records.load)

    @property
    def num_kept(self) -> int:
        return len(self._records.by_key)

    def known(self, method: str, every: Sequence[tuple[Any, ...]]) -> list[Any]:
        keys = [None if _is_drawn(asked) else _key(method, asked) for asked in every]
        found = from_first_rank(
            lambda: [self._records.by_key.get(key, {}).get("answer") for key in keys]
        )
        return [
            tuple(answer) if isinstance(answer, list) else answer for answer in found
        ]

    def add(self, method: str, asked: tuple[Any, ...], answer: object) -> None:
        if dist.get_rank() == 0 and not _is_drawn(asked):
            self._records.add({"key": _key(method, asked), "answer": answer})


def _is_drawn(asked: tuple[Any, ...]) -> bool:
    return isinstance(asked[-1], dict) and bool(asked[-1].get("do_sample"))


def _key(method: str, asked: tuple[Any, ...]) -> tuple[str, str]:
    text = json.dumps(asked, sort_keys=True, default=str)
    return method, hashlib.sha256(text.encode()).hexdigest()
