"""One class per kind of refusal; messages name the value and a remedy."""

from typing import Final

EXIT_STALLED: Final = 76
"""Exit code of a rank that ended because another one made no progress."""
EXIT_PEER_LOST: Final = 77
"""Exit code of a rank that ended because another one died or failed."""
EXIT_CLOSED_PIPE: Final = 141
"""Exit code of a command whose output nobody reads any more, as a shell reports SIGPIPE."""


class RingspanError(ValueError):
    """Base of all refusals; the command line prints one line and exits with code 2."""


class ConfigError(RingspanError):
    """A configuration, a file or an argument of a command is not usable as given."""


class LayoutError(RingspanError):
    """A layout cannot hold the sequence, or two things that must share a layout do not."""


class MaskError(RingspanError):
    """A mask is malformed, or does not fit the sequence."""


class UnsupportedError(RingspanError):
    """A model, dtype, device or option asks for something that ringspan does not do (yet)."""


class MissingExtraError(RingspanError, ImportError):
    """A package that comes with an extra of ringspan is not installed."""


class PeerMismatch(RingspanError):
    """The ranks of one ring differ in what they were given; on every rank, before any payload moves."""


class OutputError(RingspanError):
    """A file, folder or standard output cannot be written: disk full, no permission."""


class ClosedPipe(OutputError):
    """Nobody reads a command's output any more; not worth a line."""


class RankLost(RuntimeError):
    """Ranks of this machine were killed, or ended because another one was lost or stalled."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class CheckpointError(RingspanError):
    """A checkpoint cannot be written, or is truncated, changed, stale, or of another run."""
