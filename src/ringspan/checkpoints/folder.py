"""A folder or file that all ranks write during training, and that has its name once it is complete."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ringspan.checkpoints.background import Background
from ringspan.core.files.disk import sync_folder

_SCRATCH: Final = "ringspan-saving-"
_REPLACED: Final = "ringspan-replaced-"


def write_whole(
    background: Background, target: Path, write: Callable[[Path], None]
) -> None:
    """Let all ranks ``write`` under another name, and give it its own; a job of ``background``, on every rank.

    An earlier one of that name is replaced when all ranks have written, and stays if one fails. CheckpointError on all
    ranks then.
    """
    what = f"{target} not saved"
    scratch = target.with_name(f"{_SCRATCH}{target.name}")
    background.on_first(what, lambda: _prepare(target))
    try:
        write(scratch)
        background.on_first(what, lambda: _commit(scratch, target))
    # A half-written one would take up room that the next save needs.
    except BaseException:
        if background.rank == 0:
            remove(scratch)
        raise


def remove(path: Path) -> None:
    """Remove a folder or a file, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


def _prepare(target: Path) -> None:
    """Remove what interrupted saves left next to the target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    replaced = target.with_name(f"{_REPLACED}{target.name}")
    # A crash between the two renames of a commit left the earlier one under this name.
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    for left in target.parent.glob(f"{_SCRATCH}*"):
        remove(left)
    remove(replaced)


def _commit(scratch: Path, target: Path) -> None:
    """Rename what is complete and synced; the rename is the commit."""
    if scratch.is_dir():
        sync_folder(scratch)
    replaced = target.with_name(f"{_REPLACED}{target.name}")
    if target.is_dir() or (scratch.is_dir() and target.exists()):
        target.rename(replaced)
    scratch.replace(target)
    sync_folder(target.parent)
    remove(replaced)
