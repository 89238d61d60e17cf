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
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ringspan.core.errors import ConfigError
from ringspan.core.files.disk import sync_file, sync_folder
from ringspan.core.files.weights import INDEX, WEIGHTS
from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.model.weights.deferred import (
    Deferred,
    Region,
    deferred,
    held_regions,
    is_first_copy,
    overlap,
    part,
    pieces,
    region_of,
    shape_of,
)
from ringspan.torch.model.weights.files import DTYPES

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
        # The widest dtypes come first, so that all tensors are aligned, as in files of safetensors itself.
        names = sorted(
            self._split.filename_to_tensors[name],
            key=lambda each: -self._tensors[each].dtype.itemsize,
        )
        chosen = {each: self._tensors[each] for each in names}
        sink = _Sink(None if folder is None else folder / name)
        try:
            sink.put(_header(chosen))
            for tensor in chosen.values():
                for region in pieces(tensor, _PIECE_BYTES):
                    sink.put(part(tensor, region))
        finally:
            sink.close()
        if sink.problem is not None:
            raise sink.problem

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


class _Shards:
    """A tensor split over ranks; all read together, and only the writer gets numbers."""

    def __init__(self, name: str, tensor: Tensor, place: int, writer: int) -> None:
        self.name, self.shape, self.dtype, self.place = (
            name,
            tuple(tensor.shape),
            tensor.dtype,
            (place, 0),
        )
        self._local = (
            tensor.to_local() if isinstance(tensor, DTensor) else tensor
        ).detach()
        self.mine = _held_by_me(tensor, writer)
        self.everyone: list[tuple[int, Region]] = []
        self.writer = writer

    def read(self, region: Region) -> Tensor:
        """Return a part of the tensor on the writing rank, and an empty meta tensor on others; collective.

        Holders send their overlaps to the writer one after the other.
        """
        rank, device = dist.get_rank(), self._local.device
        is_writer = rank == self.writer
        result = torch.empty(
            shape_of(region), dtype=self.dtype, device="cpu" if is_writer else "meta"
        )
        for holder, held in self.everyone:
            if (meeting := overlap(region, held)) is None:
                continue
            here, there = meeting
            if holder == rank:
                piece = self._local[there]
                if is_writer:
                    result[here] = piece.cpu()
                else:
                    dist.send(piece.contiguous(), self.writer)
            elif is_writer:
                piece = torch.empty(shape_of(here), dtype=self.dtype, device=device)
                dist.recv(piece, holder)
                result[here] = piece.cpu()
        return result


def plan_weights(
    model: PreTrainedModel, mesh: DeviceMesh, **options: Any
) -> WeightsPlan:
    return plan_files(model, shards_of(model, mesh), **options)


def shards_of(model: PreTrainedModel, mesh: DeviceMesh) -> dict[str, Deferred]:
    """Return the saved tensors, for collective reading. All ranks call it."""
    names = saved_names(model)
    everything = _tensors(model)
    writer = int(mesh.mesh.min())
    shards = [
        _Shards(name, everything[name], place, writer)
        for place, name in enumerate(names)
    ]
    told = gather_over(mesh, [each.mine for each in shards])
    for index, each in enumerate(shards):
        each.everyone = [rank[index] for rank in told if rank[index] is not None]
    return {each.name: deferred(each) for each in shards}


def plan_files(
    model: PreTrainedModel, tensors: dict[str, Any], *, max_shard_size: int | str, variant: str | None = None,
    dtype: torch.dtype | None = None, save_original_format: bool = True,
) -> WeightsPlan:  # fmt: skip
    """Plan the files of transformers' ``save_pretrained`` for deferred tensors, cast to ``dtype`` if given."""
    if dtype is not None:
        parameters = {
            name for name, _ in model.named_parameters(remove_duplicate=False)
        }
        tensors = {
            name: each.to(dtype) if name in parameters else each
            for name, each in tensors.items()
        }
    made: Any = (
        revert_weight_conversion(model, tensors) if save_original_format else tensors
    )
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


def saved_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return saved parameters and persistent buffers with all their names, tied ones under their original."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    chosen = {
        next((name for name in each if name not in tied), each[0]): each
        for each in names.values()
    }
    return {name: each for name, each in chosen.items() if name not in ignored}


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set
        own = module._parameters | {
            name: x for name, x in module._buffers.items() if name not in passing
        }
        found |= {
            f"{path}.{name}" if path else name: x
            for name, x in own.items()
            if x is not None
        }
    return found


def _held_by_me(tensor: Tensor, writer: int) -> tuple[int, Region] | None:
    rank = dist.get_rank()
    if not isinstance(tensor, DTensor):
        return (rank, region_of(tensor.shape)) if rank == writer else None
    if not is_first_copy(tensor):
        return None
    return next(((rank, region) for region in held_regions(tensor)), None)
