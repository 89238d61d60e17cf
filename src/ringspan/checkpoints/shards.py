"""Tensors as files: a rank's chunks written as a shard, and read by slices on any mesh."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringspan.checkpoints.manifest import FileEntry, Manifest, Piece, TensorEntry
from ringspan.core.errors import CheckpointError
from ringspan.core.files.disk import sync_file, sync_folder
from ringspan.core.files.signed import file_digest
from ringspan.core.messages.lines import refused
from ringspan.torch.weights.deferred import Region, is_first_copy, overlap, region_at
from ringspan.torch.weights.files import opened_files


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
    """This rank's part of a tensor split like another that may lie elsewhere: moments in host memory."""

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
    # The places that torch.distributed.checkpoint plans with, for every kind of sharding.
    places: Any = (tensor.like if isinstance(tensor, Part) else tensor).__create_chunk_list__()
    assert len(places) == 1, "a DTensor has one local shard"
    local = (tensor.local if isinstance(tensor, Part) else tensor.to_local()).detach()
    if local.numel():
        assert tuple(local.shape) == tuple(places[0].sizes), "the shard is where the mesh says"
        yield Chunk(tuple(places[0].offsets), local)


def written_by_me(tensor: Tensor | Part) -> Iterator[Chunk]:
    """Return the chunks that this rank writes: of replicas, only the first writes."""
    split = tensor.like if isinstance(tensor, Part) else tensor
    if is_first_copy(split) if isinstance(split, DTensor) else dist.get_rank() == 0:
        yield from held_here(tensor)


def write_shard(path: Path, chunks: Mapping[str, Chunk], origin: dict[str, str]) -> FileEntry:
    save_file({name: chunk.data for name, chunk in chunks.items()}, path, metadata=origin)
    sync_file(path)
    entry = FileEntry(bytes=path.stat().st_size, sha256=file_digest(path))
    sync_folder(path.parent)
    return entry


def read_tensors(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor | Part]) -> None:
    with opened_files(folder) as shard, torch.no_grad():
        for name, tensor in tensors.items():
            entry = manifest.tensors.get(name)
            if entry is None:
                raise CheckpointError(f"{folder}: has no {name}; is it of another model? use its own")
            wanted = dtype_name(tensor), tuple(tensor.shape)
            if (entry.dtype, entry.shape) != wanted:
                raise CheckpointError(
                    f"{folder}: {name} is {entry.dtype} {list(entry.shape)}, expected {wanted[0]} {list(wanted[1])}"
                )
            for chunk in held_here(tensor):
                data = _plain(chunk.data)
                read_chunk(Chunk(chunk.offset, data), name, entry, folder, shard)
                if data is not chunk.data:
                    chunk.data.copy_(data)


def read_chunk(chunk: Chunk, name: str, entry: TensorEntry, folder: Path, shard: Callable[[str], Any]) -> None:
    for piece in entry.pieces:
        if meeting := overlap(region_at(chunk.offset, chunk.data.shape), region_at(piece.offset, piece.shape)):
            here, there = meeting
            path, dtype = folder / piece.file, chunk.data.dtype
            chunk.data[here].copy_(_read_slice(shard(piece.file), path, name, piece, there, dtype))


def _plain(data: Tensor) -> Tensor:
    """Return the tensor, or a plain buffer to read into if it is stored in another form (8 bits)."""
    return data if type(data) is Tensor else torch.empty(data.shape, dtype=data.dtype, device=data.device)


def _read_slice(shard: safe_open, path: Path, name: str, piece: Piece, part: Region, dtype: torch.dtype) -> Tensor:
    with refused(f"{path}: {name}", SafetensorError, OSError, ValueError, error_type=CheckpointError):
        stored = shard.get_slice(name)
        if tuple(stored.get_shape()) != piece.shape:
            raise CheckpointError(f"{path}: {name} has shape {stored.get_shape()}, expected {list(piece.shape)}")
        values = stored[part] if part else shard.get_tensor(name)
    if values.dtype != dtype:
        raise CheckpointError(f"{path}: {name} is {values.dtype}, expected {dtype}")
    return values


def dtype_name(tensor: Tensor | Part) -> str:
    return str(tensor.dtype).removeprefix("torch.")
