"""Operating system errors of unwritable output, as refusals."""

import errno
import os
import select
import sys
from contextlib import suppress
from typing import Final, TextIO

from ringspan.core.errors import ClosedPipe, OutputError, RingspanError

_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED: Final = _FULL | {
    errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


def refusal(error: BaseException) -> RingspanError | None:
    """Return the refusal for an exception, if it is one or of unwritable output, else None."""
    if isinstance(error, RingspanError):
        return error
    # Only stdout or stderr without a reader counts: a broken socket is a failure.
    if isinstance(error, BrokenPipeError):
        return (
            ClosedPipe() if any(map(_nobody_reads, (sys.stdout, sys.stderr))) else None
        )
    if not isinstance(error, OSError) or error.errno not in _REFUSED:
        return None
    if error.filename is None and error.errno not in _FULL:
        return None
    name = (
        "the output cannot be written"
        if error.filename is None
        else os.fsdecode(error.filename)
    )
    advice = (
        "make room" if error.errno in _FULL else "name another place, or change that"
    )
    return OutputError(f"{name}: {error.strerror}; {advice}")


def drop_output() -> None:
    """Discard buffered output, which Python would write again when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        # The stream is None if the shell has closed it.
        except (
            AttributeError,
            OSError,
            ValueError,
        ):
            with suppress(AttributeError, OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _nobody_reads(stream: TextIO | None) -> bool:
    if stream is None:  # the shell has closed it
        return False
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # not a file
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))
