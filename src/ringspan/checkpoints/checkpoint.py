"""The only writer of checkpoints: ranks' shards as safetensors, a manifest with digests, one commit.

A save writes into ``step_N.tmp-*``, syncs every file, gathers a vote of all ranks, renames the folder to ``step_N`` and
moves ``latest`` last; an interrupted save leaves the old state intact. A load reads slices, on any number of ranks.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from ringspan.checkpoints.background import Background
from ringspan.checkpoints.shards import (
    MANIFEST,
    Chunk,
    FileEntry,
    Manifest,
    Part,
    Piece,
    TensorEntry,
    dtype_name,
    origin_of,
    read_manifest,
    read_tensors,
    verify,
    write_shard,
    written_by_me,
)
from ringspan.core.errors import CheckpointError
from ringspan.core.files.disk import sync_folder, write_synced

_LATEST: Final = "latest"
_HEADROOM_BYTES: Final = 1 << 20  # headers, the manifest, and folders


@dataclass(kw_only=True)
class Found:
    """The newest valid checkpoint, and those passed over with reasons."""

    folder: Path | None = None
    manifest: Manifest | None = None
    skipped: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Snapshot:
    """A rank's part of a step's state, copied into CPU memory."""

    step: int
    chunks: dict[str, Chunk]
    whole: dict[str, tuple[str, tuple[int, ...]]]
    mesh: dict[str, int]
    layout: str
    state: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.data.nbytes for chunk in self.chunks.values())


def snapshot(
    step: int,
    shared: Mapping[str, Tensor | Part],
    own: Mapping[str, Tensor],
    state: dict[str, Any],
    *,
    mesh: Mapping[str, int],
    layout: str,
) -> Snapshot:
    """Copy what ``Checkpoints.save`` takes into CPU memory."""
    mine = {_own_name(dist.get_rank(), name): tensor for name, tensor in own.items()}
    chunks = {
        name: chunk.on_cpu()
        for name, tensor in shared.items()
        for chunk in written_by_me(tensor)
    }
    chunks |= {
        name: Chunk((0,) * tensor.ndim, tensor).on_cpu()
        for name, tensor in mine.items()
    }
    whole = {
        name: (dtype_name(tensor), tuple(tensor.shape))
        for name, tensor in {**shared, **mine}.items()
    }
    return Snapshot(
        step=step,
        chunks=chunks,
        whole=whole,
        mesh=dict(mesh),
        layout=layout,
        state=state,
    )


class Checkpoints:
    """A run's checkpoints; all ranks call each method. One save at a time, in a thread, from a CPU copy of shards."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        keep: int = 2,
        asynchronous: bool = True,
        background: Background | None = None,
    ) -> None:
        """Prepare the folder, and what saves during training unless it is given; collective."""
        self.folder, self.run_id = folder, run_id
        self._keep, self._asynchronous = keep, asynchronous
        self._background = Background() if background is None else background
        self._owns_background = background is None
        self._rank, self._num_ranks = self._background.rank, self._background.num_ranks
        # the last step that was committed or loaded here
        self.newest_step: int | None = None
        self._on_first(f"{folder}: cannot be prepared", self._clean)

    def save(
        self,
        step: int,
        shared: Mapping[str, Tensor | Part],
        own: Mapping[str, Tensor],
        state: dict[str, Any],
        *,
        mesh: Mapping[str, int],
        layout: str,
    ) -> CheckpointError | None:
        """Start to save the current values, unless the step is saved; return the previous save's error, if any.

        An existing checkpoint is replaced when this one is complete. ``shared``: the job's tensors, split or the same
        on every rank; ``own``: this rank's; ``state``: JSON values, the same on every rank; ``mesh`` and ``layout``:
        for information.
        """
        # One save at a time: two would need twice the memory, and could commit in reverse order.
        earlier = self.wait()
        if step == self.newest_step:
            return earlier
        taken = snapshot(step, shared, own, state, mesh=mesh, layout=layout)
        self._background.start(f"step {step} not saved", lambda: self.write(taken))
        return earlier if self._asynchronous else self.wait() or earlier

    def wait(self) -> CheckpointError | None:
        """Wait for the current save; return its error, if any, once."""
        return self._background.wait()

    def poll(self) -> CheckpointError | None:
        """Return ``wait``'s result, or None while the save is running."""
        return None if self._background.is_running() else self.wait()

    def find(self) -> Found:
        """Find the newest checkpoint whose manifest and shards verify, sharing the reading."""
        found = Found()
        for name in reversed(
            self._on_first(
                f"{self.folder}: cannot be read", lambda: saved_steps(self.folder)
            )
        ):
            try:
                found.folder, found.manifest = (
                    self.folder / name,
                    self.check(self.folder / name),
                )
                self.newest_step = found.manifest.step
                return found
            except CheckpointError as error:
                found.folder = None
                found.skipped.append(str(error))
        return found

    def check(self, folder: Path) -> Manifest:
        """Verify a checkpoint and return its manifest. Errors are raised on all ranks."""

        def work() -> str:
            nonlocal manifest
            manifest = read_manifest(folder)
            if manifest.run_id != self.run_id:
                raise CheckpointError(
                    f"{folder / MANIFEST}: is of run {manifest.run_id}, expected {self.run_id}"
                )
            # Each file is read by one rank only, since shards of a large model take minutes to verify.
            for name in sorted(manifest.files)[self._rank :: self._num_ranks]:
                verify(folder, manifest, name)
            return hashlib.sha256(manifest.dump().encode()).hexdigest()

        manifest: Manifest | None = None
        # If a shared file system lags, or none is shared, ranks might resume from different steps unnoticed.
        if len(set(self._together("", work))) > 1:
            raise CheckpointError(
                f"{folder / MANIFEST}: the ranks read different manifests; is the folder shared?"
            )
        assert manifest is not None, "read by work"
        return manifest

    def load(
        self,
        folder: Path,
        manifest: Manifest,
        shared: Mapping[str, Tensor | Part],
        own: Mapping[str, Tensor] | None,
    ) -> None:
        """Fill tensors in place from a checked checkpoint of any mesh; ``own`` tensors need an equal number of ranks.

        Errors are raised on all ranks.
        """
        mine = {
            _own_name(self._rank, name): tensor for name, tensor in (own or {}).items()
        }
        self._together("", lambda: read_tensors(folder, manifest, {**shared, **mine}))

    def close(self) -> CheckpointError | None:
        """Wait for the current save, and end what was made to save during training."""
        return self._background.close() if self._owns_background else self.wait()

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot and commit it; all ranks call it, during training.

        Ranks check the room together, write their shards, and rank 0 commits. After an error the scratch folder is
        removed.
        """
        complete = self.folder / f"step_{snapshot.step:08d}"
        scratch = self.folder / f"{complete.name}.tmp-{self.run_id}"
        # Sizes are gathered first, so that missing room is known before a byte is written.
        sizes = self._together("", lambda: snapshot.num_bytes)
        self._on_first("no checkpoint", lambda: self._make_room(scratch, sum(sizes)))
        what = f"step {snapshot.step} not saved"
        try:
            parts = self._together(what, lambda: _write_shard(scratch, self, snapshot))
            self._on_first(
                what, lambda: self._commit(scratch, complete, snapshot, parts)
            )
        # A half-written folder would take up room that the next save needs.
        except BaseException:
            if self._rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        self.newest_step = snapshot.step

    def _make_room(self, scratch: Path, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        needed = num_bytes + _HEADROOM_BYTES
        # A disk that fills up halfway would fail on some ranks only, after most of the save's time.
        if free < needed:
            raise CheckpointError(
                f"{self.folder}: {needed:,} bytes are needed, {free:,} are free; make room"
            )
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir()

    def _commit(
        self,
        scratch: Path,
        complete: Path,
        snapshot: Snapshot,
        parts: Sequence["_Part"],
    ) -> None:
        """Write the manifest, rename the scratch folder to the step's name, and remove old checkpoints, on rank 0.

        Everything is synced before the rename, which is the commit; ``latest`` follows.
        """
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
        # The manifest is written last: a folder without one is not a checkpoint.
        write_synced(scratch / MANIFEST, manifest.dump())
        sync_folder(scratch)
        # An existing folder did not verify when the run resumed, and its step was computed again.
        if complete.exists():
            complete.rename(self.folder / f"{complete.name}.tmp-replaced")
        # The commit: a rename is atomic. The folder's content was synced before it, and its parent is synced after.
        scratch.rename(complete)
        sync_folder(self.folder)
        write_synced(self.folder / _LATEST, complete.name + "\n")
        sync_folder(self.folder)
        # Later steps, which a run that was set back has not reached again, do not count as kept.
        old = [name for name in saved_steps(self.folder) if name <= complete.name]
        for name in old[: -self._keep]:
            _remove(self.folder / name)
        shutil.rmtree(self.folder / f"{complete.name}.tmp-replaced", ignore_errors=True)

    def _clean(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.tmp-*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _on_first(self, what: str, work: Callable[[], Any]) -> Any:
        return self._background.on_first(what, work)

    def _together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        return self._background.together(what, work)


@dataclass(frozen=True, kw_only=True)
class _Part:
    file: str
    entry: FileEntry | None
    pieces: dict[str, Piece]
    whole: dict[str, tuple[str, tuple[int, ...]]]


def _write_shard(folder: Path, checkpoints: Checkpoints, snapshot: Snapshot) -> _Part:
    """Write this rank's shard, if it has chunks, and return its file, its pieces and the tensors that it describes."""
    rank = checkpoints._rank
    name = f"rank_{rank:05d}.safetensors"
    # Rank 0 describes the shared tensors, and the other ranks only their own.
    own = _own_name(rank, "")
    whole = {
        n: facts
        for n, facts in snapshot.whole.items()
        if rank == 0 or n.startswith(own)
    }
    if not snapshot.chunks:
        return _Part(file=name, entry=None, pieces={}, whole=whole)
    path = folder / name
    try:
        entry = write_shard(
            path, snapshot.chunks, origin_of(checkpoints.run_id, snapshot.step)
        )
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


def saved_steps(folder: Path) -> list[str]:
    """Return the names of a folder's checkpoints, the oldest first."""
    return sorted(
        path.name
        for path in folder.glob("step_*")
        if path.name.removeprefix("step_").isdecimal()
    )


def _own_name(rank: int, name: str) -> str:
    return f"rank {rank}/{name}"


def _remove(folder: Path) -> None:
    # Renamed first, since removing a folder takes a while and may be interrupted.
    doomed = folder.with_name(f"{folder.name}.tmp-old")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)
