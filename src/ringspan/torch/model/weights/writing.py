"""Writing of a safetensors folder a piece at a time, visible when it is whole; ranks send their parts in turn."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ringspan.core.errors import ConfigError
from ringspan.core.files.disk import sync_file, sync_folder
from ringspan.core.files.weights import INDEX, WEIGHTS
from ringspan.torch.model.weights.deferred import Deferred, part, pieces, release_after
from ringspan.torch.model.weights.files import DTYPES
from ringspan.torch.model.weights.shards import Readers, as_stored, shards_of

MAX_SHARD_SIZE: Final = "5GB"
_PIECE_BYTES: Final = 1 << 26
# Room for a tokenizer with all its files, the config, and folders.
HEADROOM_BYTES: Final = 1 << 25
_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SCRATCH: Final = ".tmp-weights-"
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
Vote = Callable[[str, Exception | None], None]
"""Callback with this rank's action and error; raises on all ranks if one failed."""


class WeightsPlan:
    """Assignment of tensors to files of at most ``max_shard_size`` bytes, except for larger tensors."""

    def __init__(
        self,
        tensors: Mapping[str, Deferred],
        max_shard_size: int | str,
        variant: str | None = None,
    ) -> None:
        """Split the tensors into files in their order, named as transformers names them.

        ``variant`` is part of the names.
        """
        self._tensors = tensors
        infix = f".{variant}" if variant else ""
        self._split = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=_num_bytes,
            filename_pattern=WEIGHTS.replace(
                ".safetensors", f"{infix}{{suffix}}.safetensors"
            ),
            max_shard_size=_size_in_bytes(max_shard_size),
        )
        self._index = INDEX.replace(".json", f"{infix}.json")
        own = re.escape(WEIGHTS.replace(".safetensors", infix))
        self._replaced = re.compile(
            rf"{own}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(self._index)}"
        )
        order = [name for file in self.files for name in self._in(file)]
        self._release_after = release_after({name: tensors[name] for name in order})
        self.num_bytes = sum(map(_num_bytes, tensors.values()))

    @property
    def files(self) -> list[str]:
        return list(self._split.filename_to_tensors)

    @property
    def last_file(self) -> str:
        return self._index if len(self.files) > 1 else self.files[0]

    def replaces(self, name: str) -> bool:
        return self._replaced.fullmatch(name) is not None

    def write(self, name: str, folder: Path | None) -> None:
        """Write a file (None: only make its tensors); an OSError comes after all have been made."""
        chosen = {each: self._tensors[each] for each in self._in(name)}
        sink = _Sink(None if folder is None else folder / name)
        try:
            sink.put(_header(chosen))
            for each, tensor in chosen.items():
                for region in pieces(tensor, _PIECE_BYTES):
                    sink.put(part(tensor, region))
                for source in self._release_after.get(each, ()):
                    source.release()
        finally:
            sink.close()
        if sink.problem is not None:
            raise sink.problem

    def _in(self, file: str) -> list[str]:
        """Return a file's tensors in their order there."""
        # The widest dtypes come first, so that all tensors are aligned, as in files of safetensors itself.
        return sorted(
            self._split.filename_to_tensors[file],
            key=lambda name: -self._tensors[name].dtype.itemsize,
        )

    def write_index(self, folder: Path, num_parameters: int) -> None:
        if len(self.files) > 1:
            metadata = {"total_parameters": num_parameters, **self._split.metadata}
            index = {"metadata": metadata, "weight_map": self._split.tensor_to_filename}
            (folder / self._index).write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
            sync_file(folder / self._index)


class _Sink:
    """A file, or no destination, that keeps its error so that senders do not wait."""

    def __init__(self, path: Path | None) -> None:
        self.problem: OSError | None = None
        self._file: Any = None
        with self._noting():
            self._file = None if path is None else path.open("wb")

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = error

    def put(self, data: bytes | memoryview | Tensor) -> None:
        if self._file is not None and self.problem is None:
            if isinstance(data, Tensor):
                data = (
                    data.detach()
                    .cpu()
                    .contiguous()
                    .reshape(-1)
                    .view(torch.uint8)
                    .numpy()
                    .data
                )
            with self._noting():
                self._file.write(data)

    def close(self) -> None:
        if self._file is not None:
            with self._noting(), self._file:
                if self.problem is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())


def _size_in_bytes(size: int | str) -> int:
    found = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)\s*", size, re.IGNORECASE)
        if isinstance(size, str)
        else None
    )
    if found is not None:
        size = int(float(found[1]) * _UNITS[found[2].upper()])
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(
            f"max_shard_size={size!r}: use a number of bytes, or text with a unit, such as '2GB'"
        )
    return size


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors header: length, then JSON of dtypes, shapes and offsets, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + _num_bytes(tensor)
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def missing_room(folder: Path, num_bytes: int) -> str | None:
    """Return why ``num_bytes`` of weights do not fit into a folder; None if they do."""
    folder.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(folder).free, num_bytes + HEADROOM_BYTES
    return (
        None
        if free >= needed
        else f"{folder}: {needed:,} bytes are needed, {free:,} are free; make room"
    )


@contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
        yield Path(scratch)


def put_in_place(scratch: Path, folder: Path, plan: WeightsPlan) -> None:
    """Move all files into a folder, replacing its weights; the file that makes it a model comes last."""
    last = plan.last_file
    # Remove the index or last file first: without it, the old files are no longer a model.
    old = [
        path
        for path in folder.iterdir()
        if plan.replaces(path.name) and path.name != last
    ]
    if len(plan.files) > 1:
        old.append(folder / last)
    for path in sorted(old, key=lambda path: not path.name.endswith(".json")):
        path.unlink(missing_ok=True)
    for name in sorted(
        (path.name for path in scratch.iterdir()), key=lambda name: name == last
    ):
        if (scratch / name).is_dir():
            shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(scratch / name, folder / name)
    sync_folder(folder)


def plan_weights(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    group: ProcessGroup | None = None,
    **options: Any,
) -> WeightsPlan:
    """Plan the files of a model; with a ``group``, of copies that can be written during training over that group."""
    readers = Readers(mesh, group=group)
    return plan_files(model, shards_of(model, readers), **options)


def plan_files(
    model: PreTrainedModel, tensors: dict[str, Any], *, max_shard_size: int | str, variant: str | None = None,
    dtype: torch.dtype | None = None, save_original_format: bool = True,
) -> WeightsPlan:  # fmt: skip
    """Plan the files of transformers' ``save_pretrained`` for deferred tensors, cast to ``dtype`` if given."""
    made = as_stored(model, tensors, dtype, original=save_original_format)
    return WeightsPlan(made, max_shard_size, variant)


def write_weights(plan: WeightsPlan, folder: Path | None, vote: Vote) -> None:
    """Write all files, collectively, on writers into a ``folder``; a failure reaches all before the next."""
    for name in plan.files:
        problem: Exception | None = None
        try:
            plan.write(name, folder)
        except OSError as error:
            problem = error
        vote(f"writing {name}", problem)
