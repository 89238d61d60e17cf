"""Lightning's checkpoints, written during its steps."""

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map_only

from ringspan.checkpoints.background import Background
from ringspan.checkpoints.folder import write_whole
from ringspan.core.errors import CheckpointError
from ringspan.core.files.disk import sync_file

# Files of Lightning's folder of shards: all but tensors, and the one that PyTorch reads first.
_META: Final = "meta.pt"
_SHARDS: Final = ".metadata"


class AsyncSaves:
    """The checkpoints that a strategy writes during its steps, one at a time; all ranks make each call."""

    def __init__(self) -> None:
        self._background: Background | None = None
        # On rank 0: checkpoints that Lightning removed while the one that replaces them is being written.
        self._lock, self._is_writing = threading.Lock(), False
        self._removed: list[Callable[[], None]] = []

    def begin_folder(self, target: Path, checkpoint: dict[str, Any]) -> None:
        """Copy a checkpoint with its shards, and write it as Lightning's folder."""
        background = self._ready(target)
        tensors = {"state_dict": checkpoint.pop("state_dict")}
        optimizers = checkpoint.pop("optimizer_states", [])
        tensors |= {f"optimizer_{i}": state for i, state in enumerate(optimizers)}
        # Torch's stager makes a deep copy of each tensor, and then fills it again.
        copied = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), tensors)
        rest = io.BytesIO()
        torch.save(checkpoint, rest)

        def write_rest(scratch: Path) -> None:
            (scratch / _META).write_bytes(rest.getvalue())
            sync_file(scratch / _META)

        def write(scratch: Path) -> None:
            try:
                save(copied, checkpoint_id=scratch, process_group=background.group)
            except CheckpointException as error:
                raise CheckpointError(f"{target} not saved: {error}") from error
            background.on_first(f"{target} not saved", lambda: write_rest(scratch))

        self._begin(background, target, write)

    def begin_file(self, target: Path, write_file: Callable[[Path], None]) -> None:
        """Write a file on rank 0, from what it has copied."""
        background = self._ready(target)

        def write(scratch: Path) -> None:
            what = f"{target} not saved"
            background.on_first(what, lambda: write_file(scratch))
            background.on_first(what, lambda: sync_file(scratch))

        self._begin(background, target, write)

    def remove(self, remove: Callable[[], None]) -> None:
        """Remove a checkpoint, on rank 0: once the one that is being written is complete, if it will be."""
        with self._lock:
            if self._is_writing:
                self._removed.append(remove)
                return
        remove()

    def finish(self) -> None:
        """Wait for the checkpoint that was begun; raise CheckpointError on all ranks if it was not saved."""
        if (error := self.settle()) is not None:
            raise error

    def settle(self) -> CheckpointError | None:
        """Wait for the checkpoint that was begun, and return its error."""
        return None if self._background is None else self._background.wait()

    def _ready(self, target: Path) -> Background:
        """Wait for the last save, and check on all ranks that a folder of this name is a checkpoint."""
        if self._background is None:
            self._background = Background()
        self.finish()

        def check() -> None:
            is_checkpoint = (target / _SHARDS).is_file() or not target.is_dir()
            if not is_checkpoint and any(target.iterdir()):
                raise CheckpointError(
                    f"{target}: is a folder with other files, which a checkpoint would replace; save under another name"
                )

        self._background.on_first("", check)
        return self._background

    def _begin(
        self, background: Background, target: Path, write: Callable[[Path], None]
    ) -> None:
        self._is_writing, self._removed = True, []

        def job() -> None:
            is_saved = False
            try:
                write_whole(background, target, write)
                is_saved = True
            finally:
                with self._lock:
                    self._is_writing = False
                # Without the new checkpoint the earlier ones stay.
                for remove in self._removed if is_saved else ():
                    remove()

        background.start(f"{target} not saved", job)
