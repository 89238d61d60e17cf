"""torch's flight recorder: the last calls of this process's groups, written when a run is ended."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch._C import _distributed_c10d

# The second is the name of earlier releases.
_BUFFER_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def is_recording() -> bool:
    """Return whether this process was started with a flight recorder."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in _BUFFER_SIZES)


def write_calls(path: Path, seconds: float = 5.0) -> bool:
    """Write the recorded calls to a file that ``torchfrtrace`` reads; return whether that took less than ``seconds``.

    A process that is to end does not wait longer for a library that may hang.
    """
    writer = threading.Thread(target=_write, args=(path,), daemon=True)
    writer.start()
    writer.join(seconds)
    return not writer.is_alive() and path.exists()


def _write(path: Path) -> None:
    with suppress(OSError, RuntimeError):
        path.write_bytes(_calls())


def _calls() -> bytes:
    """Return the calls, pickled by torch; NCCL has a recorder of its own. Stacks are left out, which take long."""
    if "nccl" in str(dist.get_backend()):
        with suppress(AttributeError):
            return _distributed_c10d._dump_nccl_trace(True, False, False)  # pyright: ignore
    try:
        return _distributed_c10d._dump_fr_trace(True, False, False)  # pyright: ignore
    except AttributeError as error:
        raise RuntimeError("this release of torch records NCCL's calls only") from error
