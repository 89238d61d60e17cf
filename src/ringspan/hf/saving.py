"""A trainer's checkpoints, written during its steps."""

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch.optim import Optimizer
from transformers import TrainerState
from transformers.trainer_utils import rotate_checkpoints

from ringspan.checkpoints.background import Background
from ringspan.checkpoints.folder import write_whole
from ringspan.core.files.disk import sync_file
from ringspan.hf.progress import optimizer_snapshot, write_optimizer
from ringspan.torch.model.saving import begin_saving

_STATE: Final = "trainer_state.json"
Write = Callable[[Path], None]
"""Writes a part of a checkpoint into its folder; all ranks call it together."""


@dataclass
class SavedStep:
    """A checkpoint that is being written, with the trainer's state of its step."""

    folder: Path
    state: TrainerState
    is_pushed: bool


@dataclass
class _Parts:
    """A checkpoint's parts while a trainer collects them: small files in a folder of this rank's host, and writes."""

    local: Path
    writes: list[Write] = field(default_factory=list)
    is_pushed: bool = False


class AsyncSaves:
    """The checkpoints that a trainer writes during its steps, one at a time.

    Trainer's own code saves into a temporary folder of each rank, which takes what is small. What is large is copied
    into host memory. A thread then writes all of it, so that a step waits for no disk, shared or not.
    """

    def __init__(self) -> None:
        self._background: Background | None = None
        self._parts: _Parts | None = None
        self._begun: SavedStep | None = None

    @property
    def local(self) -> Path | None:
        """The folder that takes the place of the trainer's output folder while a checkpoint is collected."""
        return None if self._parts is None else self._parts.local

    @property
    def is_begun(self) -> bool:
        """Return whether a checkpoint is being written, or is written and ``finish`` was not called."""
        return self._begun is not None

    def has_written(self) -> bool:
        """Return whether this rank has written its part of the checkpoint that was begun."""
        running = self._background is not None and self._background.is_running()
        return self.is_begun and not running

    @contextmanager
    def collecting(self, name: str) -> Iterator[None]:
        """Collect the parts of a checkpoint of this name; ``finish`` was called for the last one."""
        if self._background is None:
            self._background = Background()
        self._parts = _Parts(Path(tempfile.mkdtemp(prefix="ringspan-")))
        # Trainer looks for it, on every rank, when it notes the best checkpoint.
        (self._parts.local / name).mkdir()
        try:
            yield
        except BaseException:
            shutil.rmtree(self._parts.local, ignore_errors=True)
            raise
        finally:
            self._parts = None

    def add_model(self, model: Any, folder: Path) -> None:
        """Write a model's small files into a local folder, and copy its weights."""
        parts, background = self._collected()
        write = begin_saving(model, folder, background.group)
        parts.writes.append(lambda folder: write(folder, _vote_of(background)))

    def add_optimizer(self, model: Any, optimizer: Optimizer, step: int) -> None:
        """Copy this rank's part of the optimizer state."""
        parts, background = self._collected()
        taken = optimizer_snapshot(model, optimizer, step)
        parts.writes.append(lambda folder: write_optimizer(folder, taken, background))

    def push_later(self) -> None:
        """Note that the checkpoint is to be uploaded once it is complete."""
        self._collected()[0].is_pushed = True

    def begin(self, target: Path, state: TrainerState, limit: int | None) -> None:
        """Write the collected parts during training, then remove checkpoints beyond a limit as Trainer does."""
        parts, background = self._collected()
        local = parts.local / target.name
        writes = [lambda folder: _copy(background, local, folder), *parts.writes]
        best = state.best_model_checkpoint

        def write(folder: Path) -> None:
            for part in writes:
                part(folder)

        def rotate() -> None:
            rotate_checkpoints(str(target.parent), limit, best, use_mtime=True)

        def job() -> None:
            try:
                write_whole(background, target, write)
                background.on_first(f"removing what came before {target}", rotate)
            finally:
                shutil.rmtree(parts.local, ignore_errors=True)

        self._begun = SavedStep(target, copy.deepcopy(state), parts.is_pushed)
        background.start(f"{target} not saved", job)

    def finish(self) -> SavedStep | None:
        """Wait for the checkpoint that was begun, if any; raise CheckpointError on all ranks if it was not saved."""
        begun, self._begun = self._begun, None
        if self._background is not None and (error := self._background.wait()):
            raise error
        return begun

    def settle(self) -> None:
        """Wait for the checkpoint that was begun, before an error of the training is raised."""
        if self._background is not None:
            self._background.wait()
        self._begun = None

    def _collected(self) -> tuple[_Parts, Background]:
        assert self._parts is not None and self._background is not None, "collecting"
        return self._parts, self._background


def note_best(state: TrainerState, local: Path, target: Path, *, writes: bool) -> None:
    """Name the checkpoint by its later place, if it has the best model so far."""
    if state.best_model_checkpoint == str(local / target.name):
        state.best_model_checkpoint = str(target)
        if writes:
            state.save_to_json(str(local / target.name / _STATE))


def _vote_of(background: Background) -> Callable[[str, Exception | None], None]:
    def vote(what: str, error: Exception | None) -> None:
        def own() -> None:
            if error is not None:
                raise error

        background.together(what, own)

    return vote


def _copy(background: Background, local: Path, folder: Path) -> None:
    """Copy each rank's small files into the checkpoint's folder, on the disk when this returns."""

    def copy_own() -> None:
        for path in sorted(local.rglob("*")):
            place = folder / path.relative_to(local)
            if path.is_dir():
                place.mkdir(exist_ok=True)
            else:
                shutil.copyfile(path, place)
                sync_file(place)

    background.on_first(f"{folder}", lambda: folder.mkdir(exist_ok=True))
    background.together(f"{folder}", copy_own)
