"""The ``ringspan`` command: one line and exit code 2 for a refused request."""

import io
import sys
from contextlib import suppress
from traceback import walk_tb
from typing import Annotated, Any

import typer

from ringspan import __version__
from ringspan.cli.commands import (
    bench,
    demo,
    doctor,
    evaluate,
    export,
    generate,
    init,
    plan,
    profile,
    prove,
    rehearse,
    train,
)
from ringspan.core.errors import EXIT_CLOSED_PIPE, ClosedPipe, RankLost
from ringspan.core.files.output import drop_output, refusal

# Depending on its version, typer carries its own click or uses the installed one.
_ClickException: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

app = typer.Typer(
    name="ringspan",
    help="Train, evaluate and run transformers on sequences that no single device can hold, with exact attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ringspan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Train, evaluate and run transformers on sequences that no single device can hold, with exact attention."""


for _module in (
    init,
    train,
    demo,
    generate,
    export,
    plan,
    rehearse,
    profile,
    prove,
    doctor,
):
    app.command(_module.__name__.rpartition(".")[2], epilog=_module.EPILOG)(
        _module.command
    )
app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="eval")


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 refused, 130 interrupted, 141 broken pipe."""
    code, message = 0, ""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Other encodings than UTF-8 may lack ± and the lines of tables.
            stream.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
        print(end="", flush=True)
    except _ClickException as error:
        # The message is empty if a command without arguments has shown its help.
        code, message = (
            2,
            error.format_message(),
        )
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except (Exception, SystemExit) as error:
        code, message = _ended(error)
    if code == 130:  # typer itself may turn an interrupt into this code
        message = "interrupted"
    with suppress(OSError):
        if message:
            print(f"ringspan: {' '.join(message.split())}", file=sys.stderr)
    drop_output()
    sys.exit(code if isinstance(code, int) else 0)


def _ended(error: BaseException) -> tuple[Any, str]:
    # click raises SystemExit for any broken pipe, rich only for its own output.
    """Return the exit code and line for the exception that ended a command; re-raise a bug."""
    if isinstance(error, SystemExit):
        if not isinstance(error.__context__, BrokenPipeError):
            return error.code, ""
        *_, (frame, _) = walk_tb(error.__traceback__)
        if frame.f_globals["__name__"] == "rich.console":
            return EXIT_CLOSED_PIPE, ""
        error = error.__context__
    refused = refusal(error)
    if isinstance(refused, ClosedPipe):
        return EXIT_CLOSED_PIPE, ""
    if refused is not None:
        return 2, str(refused)
    if isinstance(error, (RuntimeError, OSError)):
        return error.code if isinstance(error, RankLost) else 1, str(error)
    raise error
