"""The safetensors files of a Hugging Face folder, opened as they lie: nothing is read before it is asked for."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import ADAPTER_CONFIG, read_small
from ringspan.core.messages.lines import one_line
from ringspan.torch.weights.deferred import Deferred, Region, deferred

WEIGHTS: Final = "model.safetensors"
INDEX: Final = f"{WEIGHTS}.index.json"
DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip


class _Stored:
    """A tensor in a file, which stays open as long as somebody may read it."""

    def __init__(self, path: Path, file: Any, name: str, place: tuple[int, int]) -> None:
        self._path, self._file, self.place = path, file, place
        self._slice: Any = file.get_slice(name)
        self.name, self.shape = name, tuple(self._slice.get_shape())
        kind = self._slice.get_dtype()
        if kind not in DTYPES:
            raise ConfigError(f"{path}: {name} has the dtype {kind}, which is not supported")
        self.dtype: torch.dtype = DTYPES[kind]

    def read(self, region: Region) -> Tensor:
        """A part, in the memory that the file is mapped to where its rows are whole."""
        try:
            return self._slice[region] if region else self._file.get_tensor(self.name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{self._path}: {self.name} cannot be read: {one_line(error)}") from error


class WeightFiles:
    """The tensors of a folder, by name.

    Raises:
        ConfigError: there are none in safetensors; a file is missing, cut or damaged, or lacks what the index says it
            has; by name.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, Deferred] = {}
        facts: list[tuple[str, str, str, tuple[int, ...]]] = []
        for number, (path, wanted) in enumerate(_files_of(folder)):
            file = _open(path)
            for offset, name in enumerate(file.offset_keys()):
                stored = _Stored(path, file, name, (number, offset))
                self.tensors[name] = deferred(stored)
                facts.append((path.name, name, str(stored.dtype), stored.shape))
            if lacking := sorted(wanted - self.tensors.keys()):
                raise ConfigError(f"{path}: has no {lacking[0]}, which {INDEX} says is there")
        if not self.tensors:
            raise ConfigError(f"{folder}: its weights are empty")
        self.digest = hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:16]
        """Of names, dtypes and shapes, by which ranks see that they read the same."""


def folder_of(name: str | Path, *, revision: str | None = None, local_files_only: bool = False) -> Path:
    """The local folder that a name stands for: its own, or that of the Hub's cache, into which an id is downloaded.

    Raises:
        OSError, ValueError: it is neither a folder nor to be had from the Hub.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.py"]
    return Path(
        snapshot_download(str(name), revision=revision, local_files_only=local_files_only, allow_patterns=wanted)
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt").__enter__()
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing, and {INDEX} names it") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read, cut or damaged: {one_line(error)}") from error


def _files_of(folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """The files of a folder, each with the tensors that the index expects in it."""
    index = folder / INDEX
    if not index.exists():
        if (folder / WEIGHTS).exists():
            yield folder / WEIGHTS, set()
            return
        if (folder / ADAPTER_CONFIG).exists():
            raise ConfigError(
                f"{folder}: is an adapter of PEFT; load its base model, then PeftModel.from_pretrained, and parallelize"
            )
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {others[0]}, a pickle, which is not opened" if others else f"neither {WEIGHTS} nor {INDEX}"
        raise ConfigError(f"{folder}: has no weights in safetensors: {found}; save it with save_pretrained")
    try:
        names: dict[str, str] = json.loads(read_small(index))["weight_map"]
        wanted: dict[str, set[str]] = {}
        for name, file in names.items():
            if Path(file).name != file:
                raise ConfigError(f"{index}: {name} is in {file!r}, which is no file of this folder")
            wanted.setdefault(file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index}: cannot be read: {one_line(error)}") from error
    for file in sorted(wanted):
        yield folder / file, wanted[file]
