"""Text files of a run, found without importing a framework."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import few, refused

# Offsets of Arrow strings are 32-bit.
_MAX_TEXT_BYTES: Final = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """Local text files in the order of paths and names, and lines on what was left out."""

    files: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def find_files(paths: Iterable[str], extensions: Sequence[str]) -> FoundFiles:
    """List files that local paths name or have below them with such an ending, each once."""
    endings = tuple(extension.lower() for extension in extensions)
    files: dict[Path, Path] = {}  # by resolved path, so that a file reached twice is one document
    left_out: list[str] = []
    for name in paths:
        with refused(f'data.paths = "{name}": cannot be read', OSError, RuntimeError, remedy="; correct it"):
            for file in _files_at(Path(name).expanduser(), name, endings, left_out):
                size = file.stat().st_size
                if size > _MAX_TEXT_BYTES and file.suffix.lower() not in (".jsonl", ".parquet"):
                    raise ConfigError(
                        f'data.paths = "{file}": is larger than 2 GiB; split it, or make it a .jsonl file'
                    )
                files.setdefault(file.resolve(), file)
    return FoundFiles(files=list(files.values()), left_out=left_out)


def _files_at(path: Path, name: str, endings: tuple[str, ...], left_out: list[str]) -> list[Path]:
    if path.is_dir():
        found = sorted(_walk(path, endings), key=Path.as_posix)
        files = [file for file in found if file.is_file()]
        if len(files) < len(found):
            left_out.append(f"{name}: left out {len(found) - len(files)} links to nothing, pipes and the like")
        if not files:
            raise ConfigError(
                f'data.paths = "{name}": no file in it ends in {few(endings)}; correct it or data.extensions'
            )
        return files
    if not path.exists():
        raise ConfigError(
            f'data.paths = "{name}": does not exist in {Path.cwd()}; correct it, or write "hub:{name}" for the Hub'
        )
    if not path.is_file():
        raise ConfigError(f'data.paths = "{name}": is no file that can be read twice; write what it gives into one')
    return [path]


def _walk(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """List files below a folder with such endings, without hidden entries or linked folders."""

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(endings):
                yield Path(parent, name)
