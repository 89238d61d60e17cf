"""Messages of one line."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from ringspan.core.errors import ConfigError, RingspanError

LIMIT = 300
"""Characters of other programs' text that a message of ours may quote."""


def shortened(text: str, limit: int = LIMIT) -> str:
    """Shorten a text to one line of at most ``limit`` characters, cut between words."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    kept = line[: limit - 3]
    # A single word that fills the line has no other place to be cut at.
    cut = kept if line[limit - 3] == " " or " " not in kept else kept[: kept.rindex(" ")]
    return cut.rstrip(" ,;:") + "..."


def one_line(error: BaseException, limit: int = LIMIT) -> str:
    return shortened(str(error), limit) or type(error).__name__


def few(items: Iterable[object], limit: int = 8) -> str:
    every = [str(item) for item in items]
    return ", ".join(every[:limit]) + (f" and {len(every) - limit} more" if len(every) > limit else "")


@contextmanager
def refused(
    what: str, *kinds: type[BaseException], remedy: str = "", error_type: type[RingspanError] = ConfigError
) -> Generator[None]:
    """Turn errors of these kinds into ours: ``what``, their message and the remedy."""
    try:
        yield
    except RingspanError:
        raise
    except kinds as error:
        raise error_type(f"{what}: {one_line(error)}{remedy}") from error
