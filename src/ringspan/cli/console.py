"""Console output: as wide as the terminal; plain and unwrapped into a file or pipe."""

import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

INTERRUPTED: Final = 130  # exit code of an interrupted command
_UNLIMITED: Final = 100_000
_UNIT: Final = re.compile(
    r"(?<=\d) (?=([kMGTPEZY]?(B|FLOP)(/s)?|tokens|days|h|min|s|ms|µs|ns)\b)"
)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the command chooses the exit code; rich would end the process."""
        raise BrokenPipeError


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    color = None if os.environ.get("NO_COLOR") else "auto"
    return _Console(
        stderr=stderr,
        quiet=quiet,
        highlight=False,
        width=_width(stream),
        color_system=color,
    )


def _width(stream: object) -> int:
    """Return COLUMNS, the terminal's width, or None for a file, which is not cut."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _UNLIMITED  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, OSError, ValueError):  # no file, no terminal
        return _UNLIMITED


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def hush() -> None:
    """Silence transformers' progress bars and warnings, which every rank would print."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def silent(line: str) -> None:
    """Print nothing, as ``say`` if something else shows progress."""


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Yield a function that reports progress on standard error: a status, or lines in a pipe."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield say
        return
    with out.status("starting") as status:
        yield lambda line: status.update(Text(line))


@contextmanager
def importing(*, quiet: bool = False) -> Iterator[None]:
    """Show a status while PyTorch and transformers are imported; end the process at once on an interrupt.

    An exception would leave modules half imported, or be caught by libraries. Ignored interrupts (background jobs) stay
    ignored.
    """
    out = console(stderr=True, quiet=quiet)

    def interrupted(*_: object) -> None:
        # Clears the line and shows the cursor again.
        os.write(
            2, b"\r\x1b[2K\x1b[?25h" * out.is_terminal + b"ringspan: interrupted\n"
        )
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and before is not signal.SIG_IGN
    )
    if is_ours:
        signal.signal(signal.SIGINT, interrupted)
    try:
        with out.status("importing PyTorch and transformers"):
            yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


def heading(out: Console, text: str) -> None:
    out.print(Text(text, style="bold"), soft_wrap=True)


def paragraph(out: Console, text: str, first: str = "", style: str = "") -> None:
    lines = _wrapped(text, out.width - len(first)) or [""]
    for number, line in enumerate(lines):
        out.print(
            Text(f"{' ' * len(first) if number else first}{line}", style=style),
            soft_wrap=True,
        )


def facts(out: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    heading(out, title)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        paragraph(out, value, first=f"  {name:<{width}}  ")


def table(
    out: Console,
    title: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: int = 0,
) -> None:
    heading(out, title)
    grid = Table()
    for index, header in enumerate(headers):
        is_number = index >= len(headers) - numbers
        grid.add_column(
            Text(header), justify="right" if is_number else "left", overflow="fold"
        )
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    out.print(grid)


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap into lines of whole words; a number and its unit are one word."""
    tied = _UNIT.sub("\u00a0", text)
    lines = textwrap.wrap(
        tied, max(20, width), break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\u00a0", " ") for line in lines]
