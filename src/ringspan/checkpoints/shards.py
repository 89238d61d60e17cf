"""Files of a checkpoint, only JSON and safetensors: a signed manifest, and shards, read by slices on any mesh."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    model_validator,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringspan.checkpoints.slices import SavedRows, moved_rows
from ringspan.core.errors import CheckpointError
from ringspan.core.files.disk import sync_file, sync_folder
from ringspan.core.files.signed import file_digest, read_signed, signed, why_not_written
from ringspan.core.messages.lines import refused, shortened
from ringspan.torch.model.weights.deferred import (
    Region,
    is_first_copy,
    overlap,
    region_at,
)
from ringspan.torch.model.weights.files import opened_files

MANIFEST: Final = "manifest.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileEntry(_Record):
    bytes: NonNegativeInt
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Piece(_Record):
    """A rectangle of a tensor: ``tensor[offset : offset + shape]``, under the tensor's name in one file."""

    file: str
    offset: tuple[NonNegativeInt, ...] = Field(strict=False)
    shape: tuple[NonNegativeInt, ...] = Field(strict=False)


class TensorEntry(_Record):
    dtype: str
    shape: tuple[NonNegativeInt, ...] = Field(strict=False)
    pieces: tuple[Piece, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _pieces_make_it_up(self) -> "TensorEntry":
        """Raise ValueError unless pieces lie inside the tensor, begin at different places and add up to it."""
        for piece in self.pieces:
            inside = len(piece.offset) == len(piece.shape) == len(self.shape) and all(
                first + size <= whole
                for first, size, whole in zip(
                    piece.offset, piece.shape, self.shape, strict=True
                )
            )
            if not inside:
                raise ValueError(
                    f"a piece {piece.offset} + {piece.shape} is not inside the shape {self.shape}"
                )
        if len({piece.offset for piece in self.pieces}) < len(self.pieces):
            raise ValueError("two pieces start at the same place")
        if sum(math.prod(piece.shape) for piece in self.pieces) != math.prod(
            self.shape
        ):
            raise ValueError(f"the pieces do not make up the shape {self.shape}")
        return self


class Manifest(_Record):
    """A checkpoint: run, step, layout, each file's digest and each tensor's place."""

    format: Literal["ringspan checkpoint 1"] = "ringspan checkpoint 1"
    run_id: str
    step: NonNegativeInt
    num_ranks: int = Field(ge=1)
    mesh: dict[str, int]
    layout: str
    # JSON values for resuming, such as the data's position and the guard's state.
    state: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @model_validator(mode="after")
    def _files_are_known_and_inside(self) -> "Manifest":
        for name in self.files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{name!r} is not the name of a shard")
        for tensor, entry in self.tensors.items():
            for piece in entry.pieces:
                if piece.file not in self.files:
                    raise ValueError(
                        f"{tensor} lies in {piece.file!r}, which is not among the files"
                    )
        return self

    def dump(self) -> str:
        return signed(self.model_dump(mode="json"))


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest.model_validate(
            read_signed(path, "the checkpoint was not finished: use another")
        )
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise CheckpointError(
            f"{path}: {shortened(place)}: {shortened(problem['msg'])}"
        ) from error


def verify(folder: Path, manifest: Manifest, name: str) -> None:
    path, entry = folder / name, manifest.files[name]
    if problem := why_not_written(path, entry.bytes, entry.sha256):
        raise CheckpointError(f"{path}: {problem}{_origin(path, manifest)}")


def origin_of(run_id: str, step: int) -> dict[str, str]:
    """Return a shard header's record of its save."""
    return {"run_id": run_id, "step": str(step)}


def _origin(path: Path, manifest: Manifest) -> str:
    try:
        with safe_open(path, "numpy") as shard:
            origin = shard.metadata() or {}
    except (SafetensorError, OSError, ValueError):
        return "; its content is damaged"
    if origin != origin_of(manifest.run_id, manifest.step):
        return f"; it is of step {origin.get('step', '?')} of run {origin.get('run_id', '?')}: stale"
    return "; its content is damaged"


@dataclass(frozen=True)
class Chunk:
    offset: tuple[int, ...]
    data: Tensor

    def on_cpu(self) -> "Chunk":
        """Copy to CPU memory, even if it is there already."""
        copy = torch.empty(self.data.shape, dtype=self.data.dtype, device="cpu")
        return Chunk(self.offset, copy.copy_(self.data))


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor that is split like another one but may be elsewhere, such as moments on the host."""

    local: Tensor
    like: DTensor

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def shape(self) -> torch.Size:
        return self.like.shape


def held_here(tensor: Tensor | Part) -> Iterator[Chunk]:
    """Return this rank's chunks of a tensor with their place in the whole; none for an empty part."""
    if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
        yield Chunk((0,) * tensor.ndim, tensor.detach())
        return
    # torch.distributed.checkpoint plans with the same places, for every kind of sharding.
    places: Any = (
        tensor.like if isinstance(tensor, Part) else tensor
    ).__create_chunk_list__()
    assert len(places) == 1, "a DTensor has one local shard"
    local = (tensor.local if isinstance(tensor, Part) else tensor.to_local()).detach()
    if local.numel():
        assert tuple(local.shape) == tuple(places[0].sizes), (
            "the shard is where the mesh says"
        )
        yield Chunk(tuple(places[0].offsets), local)


def written_by_me(tensor: Tensor | Part) -> Iterator[Chunk]:
    """Return the chunks that this rank writes: of replicas, only the first writes."""
    split = tensor.like if isinstance(tensor, Part) else tensor
    if is_first_copy(split) if isinstance(split, DTensor) else dist.get_rank() == 0:
        yield from held_here(tensor)


def write_shard(
    path: Path, chunks: Mapping[str, Chunk], origin: dict[str, str]
) -> FileEntry:
    save_file(
        {name: chunk.data for name, chunk in chunks.items()}, path, metadata=origin
    )
    sync_file(path)
    entry = FileEntry(bytes=path.stat().st_size, sha256=file_digest(path))
    sync_folder(path.parent)
    return entry


def read_tensors(
    folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor | Part]
) -> None:
    """Fill tensors in place with this rank's parts; each part is read from the pieces that overlap it.

    Experts may be saved in other slices. Raises CheckpointError for a tensor that the checkpoint lacks or has with
    another dtype or shape.
    """
    moved = moved_tensors(manifest, tensors)
    with opened_files(folder) as shard, torch.no_grad():
        for name, tensor in tensors.items():
            rows = moved.get(name)
            for source in (name,) if rows is None else [each.name for each in rows]:
                shape = tuple(tensor.shape) if rows is None else None
                _check_entry(folder, manifest, source, dtype_name(tensor), shape)
            for chunk in held_here(tensor):
                data = _plain(chunk.data)
                whole = Chunk(chunk.offset, data)
                parts = [(name, whole)] if rows is None else _parts_of(whole, rows)
                for source, part in parts:
                    read_chunk(part, source, manifest.tensors[source], folder, shard)
                if data is not chunk.data:
                    chunk.data.copy_(data)


def moved_tensors(
    manifest: Manifest, tensors: Mapping[str, Tensor | Part]
) -> dict[str, list[SavedRows]]:
    """Return the saved rows of tensors of experts whose slices are others in the checkpoint."""
    saved = {name: entry.shape for name, entry in manifest.tensors.items()}
    return moved_rows(
        saved, {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    )


def _parts_of(chunk: Chunk, rows: list[SavedRows]) -> Iterator[tuple[str, Chunk]]:
    """Yield the saved tensors that overlap a chunk, with its rows of each, at their places there."""
    for each in rows:
        if not chunk.offset:  # a number, which all slices have
            yield each.name, chunk
            return
        begin = chunk.offset[0]
        first = max(begin, each.place)
        last = min(begin + len(chunk.data), each.place + each.count)
        if first < last:
            offset = (first - each.place + each.first, *chunk.offset[1:])
            yield each.name, Chunk(offset, chunk.data[first - begin : last - begin])


def _check_entry(
    folder: Path,
    manifest: Manifest,
    name: str,
    dtype: str,
    shape: tuple[int, ...] | None,
) -> None:
    """Raise CheckpointError if the checkpoint lacks a tensor, or has it with another dtype or shape."""
    entry = manifest.tensors.get(name)
    if entry is None:
        why = "is it of another model? use its own"
        if name.startswith("optimizer/"):
            why = "was it saved with another optimizer? set that one again"
        raise CheckpointError(f"{folder}: has no {name}; {why}")
    wanted = dtype, entry.shape if shape is None else shape
    if (entry.dtype, entry.shape) != wanted:
        raise CheckpointError(
            f"{folder}: {name} is {entry.dtype} {list(entry.shape)}, expected {wanted[0]} {list(wanted[1])}"
        )


def read_chunk(
    chunk: Chunk,
    name: str,
    entry: TensorEntry,
    folder: Path,
    shard: Callable[[str], Any],
) -> None:
    for piece in entry.pieces:
        if meeting := overlap(
            region_at(chunk.offset, chunk.data.shape),
            region_at(piece.offset, piece.shape),
        ):
            here, there = meeting
            path, dtype = folder / piece.file, chunk.data.dtype
            chunk.data[here].copy_(
                _read_slice(shard(piece.file), path, name, piece, there, dtype)
            )


def _plain(data: Tensor) -> Tensor:
    """Return the tensor, or a plain buffer to read into if it is stored in another form (8 bits)."""
    return (
        data
        if type(data) is Tensor
        else torch.empty(data.shape, dtype=data.dtype, device=data.device)
    )


def _read_slice(
    shard: safe_open,
    path: Path,
    name: str,
    piece: Piece,
    part: Region,
    dtype: torch.dtype,
) -> Tensor:
    """Return a part of a piece; raise CheckpointError if the file has the piece with another shape or dtype."""
    with refused(
        f"{path}: {name}",
        SafetensorError,
        OSError,
        ValueError,
        error_type=CheckpointError,
    ):
        stored = shard.get_slice(name)
        if tuple(stored.get_shape()) != piece.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {stored.get_shape()}, expected {list(piece.shape)}"
            )
        values = stored[part] if part else shard.get_tensor(name)
    if values.dtype != dtype:
        raise CheckpointError(f"{path}: {name} is {values.dtype}, expected {dtype}")
    return values


def dtype_name(tensor: Tensor | Part) -> str:
    return str(tensor.dtype).removeprefix("torch.")
