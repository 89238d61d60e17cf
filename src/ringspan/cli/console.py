"""How commands print: as wide as the terminal, and into a file or a pipe without colour and without wrapping."""

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

INTERRUPTED: Final = 130
"""The exit code of a command that was told to stop."""
_UNLIMITED: Final = 100_000
_UNIT: Final = re.compile(r"(?<=\d) (?=([kMGTPEZY]?(B|FLOP)(/s)?|tokens|days|h|min|s|ms|µs|ns)\b)")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave the exit code to the command, where rich would end the process."""
        raise BrokenPipeError


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console for standard output, or for what is shown while a command works."""
    stream = sys.stderr if stderr else sys.stdout
    color = None if os.environ.get("NO_COLOR") else "auto"
    return _Console(stderr=stderr, quiet=quiet, highlight=False, width=_width(stream), color_system=color)


def _width(stream: object) -> int:
    """COLUMNS where it is set, the terminal's, or none: what goes into a file is not cut to a terminal's width."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _UNLIMITED  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, OSError, ValueError):  # no file, no terminal
        return _UNLIMITED


def say(line: str) -> None:
    """A line on the standard error stream, at once."""
    print(line, file=sys.stderr, flush=True)


def silent(line: str) -> None:
    """Instead of ``say``, where something else shows what goes on."""


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """A function that says what a command does now, on the standard error stream: in a status on a terminal, in a line
    of its own in a pipe.
    """
    out = console(stderr=True)
    if not out.is_terminal:
        yield say
        return
    with out.status("starting") as status:
        yield lambda line: status.update(Text(line))


@contextmanager
def importing(*, quiet: bool = False) -> Iterator[None]:
    """While PyTorch and transformers are imported, which takes seconds: a status, and an interrupt ends the process at
    once. As an exception it would leave modules half imported, and libraries that catch it go on. Where interrupts are
    ignored, as by what a shell script starts in the background, they stay so.
    """

    out = console(stderr=True, quiet=quiet)

    def interrupted(*_: object) -> None:
        os.write(2, b"\r\x1b[2K\x1b[?25h" * out.is_terminal + b"ringspan: interrupted\n")  # the cursor shows again
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and before is not signal.SIG_IGN
    if is_ours:
        signal.signal(signal.SIGINT, interrupted)
    try:
        with out.status("importing PyTorch and transformers"):
            yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


def heading(out: Console, text: str) -> None:
    """A line in bold above what belongs together."""
    out.print(Text(text, style="bold"), soft_wrap=True)


def paragraph(out: Console, text: str, first: str = "", style: str = "") -> None:
    """Text that wraps between words, indented by what stands before its first line."""
    lines = _wrapped(text, out.width - len(first)) or [""]
    for number, line in enumerate(lines):
        out.print(Text(f"{' ' * len(first) if number else first}{line}", style=style), soft_wrap=True)


def facts(out: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Names and values under a title; a value that is longer than a line goes on below itself."""
    heading(out, title)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        paragraph(out, value, first=f"  {name:<{width}}  ")


def table(out: Console, title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> None:
    """A table under its title; the last ``numbers`` columns are aligned to the right."""
    heading(out, title)
    grid = Table()
    for index, header in enumerate(headers):
        is_number = index >= len(headers) - numbers
        grid.add_column(Text(header), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    out.print(grid)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of whole words; a number and its unit are one word."""
    tied = _UNIT.sub("\u00a0", text)
    lines = textwrap.wrap(tied, max(20, width), break_long_words=False, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]
