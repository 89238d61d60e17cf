"""The only writer of checkpoints: each rank's shards as safetensors, a manifest with their digests, and one commit.

A save writes into ``step_N.tmp-*``, syncs every file, gathers a vote of all ranks, renames the folder to ``step_N`` and
moves ``latest`` last. Whenever it is cut short, what was there before is still there, whole. A load reads slices, so it
does not matter how many ranks wrote them, or on which mesh.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringspan.core.errors import CheckpointError
from ringspan.torch.gather import gather
from ringspan.train.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    file_digest,
    origin_of,
    read_manifest,
    verify,
)

_LATEST: Final = "latest"
_HEADROOM_BYTES: Final = 1 << 20  # headers, the manifest, and folders


@dataclass(frozen=True)
class Chunk:
    """What this rank holds of a tensor."""

    offset: tuple[int, ...]
    data: Tensor


@dataclass(kw_only=True)
class Found:
    """The newest valid checkpoint, and what was passed over on the way to it, with the reasons."""

    folder: Path | None = None
    manifest: Manifest | None = None
    skipped: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class _Snapshot:
    """The values of one step, copied to the CPU."""

    step: int
    chunks: dict[str, Chunk]
    whole: dict[str, tuple[str, tuple[int, ...]]]
    mesh: dict[str, int]
    layout: str
    state: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.data.nbytes for chunk in self.chunks.values())


class Checkpoints:
    """The checkpoints of one run, in ``folder``; every rank makes one and calls its methods together.

    A save runs in a thread, with a process group of its own, on a copy of the values: one copy of this rank's shards in
    CPU memory for as long as it takes. At most one is under way.
    """

    def __init__(self, folder: Path, *, run_id: str, keep: int = 2, asynchronous: bool = True) -> None:
        self.folder, self.run_id = folder, run_id
        self._keep, self._asynchronous = keep, asynchronous
        # Its own group: a save talks while the training step does. Gloo: it talks about what is on the CPU.
        self._group: Any = dist.new_group(backend="gloo")
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self.newest_step: int | None = None
        """The last step that was committed or loaded here."""
        self._together(f"{folder}: cannot be prepared", self._clean)

    def save(
        self,
        step: int,
        shared: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        state: dict[str, Any],
        *,
        mesh: Mapping[str, int],
        layout: str,
    ) -> CheckpointError | None:
        """Save the values that the tensors have now; returns what went wrong with the save before this one, if any did.

        A step that is saved already stays as it is.

        Args:
            step: its number; an existing checkpoint of that step gives way only when this one is complete.
            shared: tensors of the whole job by name: DTensors, or plain tensors that are the same on every rank.
            own: plain tensors that belong to this rank alone.
            state: JSON values, the same on every rank.
            mesh: sizes of the mesh, for the reader.
            layout: layout of the sequences, for the reader.
        """
        earlier = self.wait()
        if step == self.newest_step:
            return earlier
        snapshot = self._snapshot(step, shared, own, state, dict(mesh), layout)
        self._thread = threading.Thread(target=self._save, args=(snapshot,), name=f"save step {step}", daemon=True)
        self._thread.start()
        return earlier if self._asynchronous else self.wait() or earlier

    def wait(self) -> CheckpointError | None:
        """Wait for the save under way; what went wrong with it, if anything. Each failure is returned once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def poll(self) -> CheckpointError | None:
        """Like ``wait``, but None while the save is still under way."""
        return None if self._thread is not None and self._thread.is_alive() else self.wait()

    def find(self) -> Found:
        """The newest checkpoint whose manifest and shards are all what was written. The ranks share the reading."""
        candidates = self._together(f"{self.folder}: cannot be read", self._candidates)[0]
        found = Found()
        for name in candidates:
            try:
                found.folder, found.manifest = self.folder / name, self.check(self.folder / name)
                self.newest_step = found.manifest.step
                return found
            except CheckpointError as error:
                found.folder = None
                found.skipped.append(str(error))
        return found

    def check(self, folder: Path) -> Manifest:
        """The manifest of one checkpoint, after all of it was verified.

        Raises:
            CheckpointError: on every rank alike, naming the file and what is wrong with it.
        """

        def work() -> str:
            nonlocal manifest
            manifest = read_manifest(folder)
            if manifest.run_id != self.run_id:
                raise CheckpointError(f"{folder / MANIFEST}: is of run {manifest.run_id}, expected {self.run_id}")
            for name in sorted(manifest.files)[self._rank :: self._num_ranks]:
                verify(folder, manifest, name)
            return hashlib.sha256(manifest.dump().encode()).hexdigest()

        manifest: Manifest | None = None
        if len(set(self._together("", work))) > 1:
            raise CheckpointError(f"{folder / MANIFEST}: the ranks read different manifests; is the folder shared?")
        assert manifest is not None, "read by work"
        return manifest

    def load(
        self, folder: Path, manifest: Manifest, shared: Mapping[str, Tensor], own: Mapping[str, Tensor] | None
    ) -> None:
        """Fill tensors in place from a checkpoint that was checked, whatever mesh it was saved on.

        ``own`` may be given when as many ranks load as saved.

        Raises:
            CheckpointError: on every rank alike: a tensor is missing, or has another shape or dtype.
        """
        mine = {_own_name(self._rank, name): tensor for name, tensor in (own or {}).items()}
        self._together("", lambda: read_tensors(folder, manifest, {**shared, **mine}))

    def close(self) -> CheckpointError | None:
        """Wait for the save under way and give the process group back."""
        error = self.wait()
        dist.destroy_process_group(self._group)
        return error

    def _snapshot(
        self,
        step: int,
        shared: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        state: dict[str, Any],
        mesh: dict[str, int],
        layout: str,
    ) -> _Snapshot:
        chunks = {name: _to_cpu(chunk) for name, tensor in shared.items() for chunk in written_by_me(tensor)}
        whole = {name: (_dtype_name(tensor), tuple(tensor.shape)) for name, tensor in shared.items()}
        for name, tensor in own.items():
            mine = _own_name(self._rank, name)
            chunks[mine] = _to_cpu(Chunk((0,) * tensor.ndim, tensor))
            whole[mine] = _dtype_name(tensor), tuple(tensor.shape)
        return _Snapshot(step=step, chunks=chunks, whole=whole, mesh=mesh, layout=layout, state=state)

    def _save(self, snapshot: _Snapshot) -> None:
        complete = self.folder / f"step_{snapshot.step:08d}"
        scratch = self.folder / f"{complete.name}.tmp-{self.run_id}"
        try:
            sizes = self._together("", lambda: snapshot.num_bytes)
            self._together("no checkpoint", lambda: self._make_room(scratch, sum(sizes)))
            try:
                parts = self._together(f"step {snapshot.step} not saved", lambda: _write_shard(scratch, self, snapshot))
                self._together(
                    f"step {snapshot.step} not saved", lambda: self._commit(scratch, complete, snapshot, parts)
                )
            except BaseException:
                if self._rank == 0:
                    shutil.rmtree(scratch, ignore_errors=True)
                raise
            self.newest_step = snapshot.step
        except CheckpointError as error:
            self._error = error
        except RuntimeError as error:  # a peer is gone; the training step finds the same
            self._error = CheckpointError(f"step {snapshot.step} not saved: {error}")

    def _make_room(self, scratch: Path, num_bytes: int) -> None:
        if self._rank != 0:
            return
        free = shutil.disk_usage(self.folder).free
        needed = num_bytes + _HEADROOM_BYTES
        if free < needed:
            raise CheckpointError(f"{self.folder}: {needed} bytes are needed, {free} are free; make room")
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir()

    def _commit(self, scratch: Path, complete: Path, snapshot: _Snapshot, parts: Sequence["_Part"]) -> None:
        if self._rank != 0:
            return
        whole = {name: entry for part in parts for name, entry in part.whole.items()}
        pieces: dict[str, list[Piece]] = {name: [] for name in whole}
        for part in parts:
            for name, piece in part.pieces.items():
                pieces[name].append(piece)
        manifest = Manifest(
            run_id=self.run_id,
            step=snapshot.step,
            num_ranks=self._num_ranks,
            mesh=snapshot.mesh,
            layout=snapshot.layout,
            state=snapshot.state,
            files={part.file: part.entry for part in parts if part.entry},
            tensors={
                name: TensorEntry(dtype=dtype, shape=shape, pieces=tuple(pieces[name]))
                for name, (dtype, shape) in whole.items()
            },
        )
        write_synced(scratch / MANIFEST, manifest.dump())
        sync_folder(scratch)
        if complete.exists():  # refused when the run was resumed; the step was computed anew
            complete.rename(self.folder / f"{complete.name}.tmp-replaced")
        scratch.rename(complete)
        sync_folder(self.folder)
        write_synced(self.folder / _LATEST, complete.name + "\n")
        sync_folder(self.folder)
        old = [path for path in self._steps() if path.name <= complete.name]
        for path in old[: -self._keep]:
            _remove(path)
        shutil.rmtree(self.folder / f"{complete.name}.tmp-replaced", ignore_errors=True)

    def _clean(self) -> None:
        """Remove what saves that were cut short left behind."""
        if self._rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob("*.tmp-*"):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _steps(self) -> list[Path]:
        """Folders of finished saves, the oldest first."""
        return sorted(path for path in self.folder.glob("step_*") if path.name.removeprefix("step_").isdecimal())

    def _candidates(self) -> list[str]:
        return [path.name for path in reversed(self._steps())] if self._rank == 0 else []

    def _together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank and give each what all returned; if it failed on any rank, fail on all.

        This is the vote: no rank decides alone, so none is left waiting for one that has given up.
        """
        problem, result = None, None
        try:
            result = work()
        except (CheckpointError, OSError, SafetensorError, ValueError, MemoryError) as error:
            known = isinstance(error, CheckpointError)
            problem = str(error) if known else f"{type(error).__name__}: {error}"
        votes = gather((problem, result), self._group)
        problems = {rank: problem for rank, (problem, _) in enumerate(votes) if problem is not None}
        if problems:
            rank, first = next(iter(problems.items()))
            more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
            raise CheckpointError(f"{what}: rank {rank}: {first}{more}" if what else f"{first}{more}")
        return [result for _, result in votes]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one rank wrote."""

    file: str
    entry: FileEntry | None
    pieces: dict[str, Piece]
    whole: dict[str, tuple[str, tuple[int, ...]]]


def _write_shard(folder: Path, checkpoints: Checkpoints, snapshot: _Snapshot) -> _Part:
    rank = checkpoints._rank
    name = f"rank_{rank:05d}.safetensors"
    # Rank 0 speaks for what all share; the others for what is theirs alone.
    own = _own_name(rank, "")
    whole = {n: facts for n, facts in snapshot.whole.items() if rank == 0 or n.startswith(own)}
    if not snapshot.chunks:
        return _Part(file=name, entry=None, pieces={}, whole=whole)
    path = folder / name
    tensors = {name: chunk.data for name, chunk in snapshot.chunks.items()}
    try:
        save_file(tensors, path, metadata=origin_of(checkpoints.run_id, snapshot.step))
        sync_file(path)
        entry = FileEntry(bytes=path.stat().st_size, sha256=file_digest(path))
        sync_folder(folder)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(folder).free
        raise CheckpointError(
            f"{path}: {error}; {snapshot.num_bytes} bytes are needed here, {free} are free"
        ) from error
    pieces = {
        tensor: Piece(file=name, offset=chunk.offset, shape=tuple(chunk.data.shape))
        for tensor, chunk in snapshot.chunks.items()
    }
    return _Part(file=name, entry=entry, pieces=pieces, whole=whole)


def held_here(tensor: Tensor) -> Iterator[Chunk]:
    """What this rank holds of a tensor, at its place in the whole; nothing where it holds an empty part."""
    if not isinstance(tensor, DTensor):
        yield Chunk((0,) * tensor.ndim, tensor.detach())
        return
    # The places that torch.distributed.checkpoint plans with, for every kind of sharding.
    places: Any = tensor.__create_chunk_list__()
    assert len(places) == 1, "a DTensor has one local shard"
    local = tensor.to_local().detach()
    if local.numel():
        assert tuple(local.shape) == tuple(places[0].sizes), "the shard is where the mesh says"
        yield Chunk(tuple(places[0].offsets), local)


def written_by_me(tensor: Tensor) -> Iterator[Chunk]:
    """What this rank writes of a tensor: of replicas, only the first does."""
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "the rank is in the mesh"
        first = all(place == 0 for place, p in zip(coordinate, tensor.placements, strict=True) if p.is_replicate())
    else:
        first = dist.get_rank() == 0
    if first:
        yield from held_here(tensor)


def read_tensors(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's part of each tensor with the slices of the checkpoint's pieces that it meets.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or dtype.
    """
    with ExitStack() as stack, torch.no_grad():
        files: dict[str, Any] = {}
        for name, tensor in tensors.items():
            entry = manifest.tensors.get(name)
            if entry is None:
                raise CheckpointError(f"{folder}: has no {name}; is it of another model?")
            wanted = _dtype_name(tensor), tuple(tensor.shape)
            if (entry.dtype, entry.shape) != wanted:
                raise CheckpointError(
                    f"{folder}: {name} is {entry.dtype} {list(entry.shape)}, expected {wanted[0]} {list(wanted[1])}"
                )
            for chunk in held_here(tensor):
                for piece in entry.pieces:
                    meeting = _meeting(chunk, piece)
                    if meeting is None:
                        continue
                    if piece.file not in files:
                        files[piece.file] = stack.enter_context(_open_shard(folder / piece.file))
                    here, there = meeting
                    shard, path = files[piece.file], folder / piece.file
                    chunk.data[here].copy_(_read_slice(shard, path, name, piece, there, tensor.dtype))


_Slices = tuple[slice, ...]


def _meeting(chunk: Chunk, piece: Piece) -> tuple[_Slices, _Slices] | None:
    """Where a chunk and a piece of one tensor overlap, in the indices of each; None where they do not."""
    here, there = [], []
    for first, size, start, length in zip(chunk.offset, chunk.data.shape, piece.offset, piece.shape, strict=True):
        low, high = max(first, start), min(first + size, start + length)
        if low >= high:
            return None
        here.append(slice(low - first, high - first))
        there.append(slice(low - start, high - start))
    return tuple(here), tuple(there)


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a shard: {' '.join(str(error).split())}") from error


def _read_slice(shard: Any, path: Path, name: str, piece: Piece, part: _Slices, dtype: torch.dtype) -> Tensor:
    try:
        stored = shard.get_slice(name)
        if tuple(stored.get_shape()) != piece.shape:
            raise CheckpointError(f"{path}: {name} has shape {stored.get_shape()}, expected {list(piece.shape)}")
        values = stored[part] if part else shard.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {name}: {' '.join(str(error).split())}") from error
    if values.dtype != dtype:
        raise CheckpointError(f"{path}: {name} is {values.dtype}, expected {dtype}")
    return values


def _own_name(rank: int, name: str) -> str:
    return f"rank {rank}/{name}"


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _to_cpu(chunk: Chunk) -> Chunk:
    copy = torch.empty(chunk.data.shape, dtype=chunk.data.dtype, device="cpu")
    return Chunk(chunk.offset, copy.copy_(chunk.data))


def write_synced(path: Path, text: str) -> None:
    """Put a small file in place of another at once, on the disk when this returns but for ``sync_folder``."""
    scratch = path.with_name(f"{path.name}.tmp-new")
    scratch.write_text(text, encoding="utf-8")
    sync_file(scratch)
    scratch.replace(path)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    sync_file(path)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; cut short, what is left is no checkpoint."""
    doomed = folder.with_name(f"{folder.name}.tmp-old")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)
