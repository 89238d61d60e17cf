"""The ``ringspan`` command: one line and exit code 2 for whatever is refused."""

import sys

import typer

from ringspan.cli import bench, demo, train
from ringspan.core.errors import RingspanError

# typer carries its own click, or uses the installed one, by version.
_ClickException = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="ringspan",
    help="Train, evaluate and run transformers on sequences that no single device can hold, with exact attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", epilog=train.EPILOG)(train.command)
app.command("demo", epilog=demo.EPILOG)(demo.command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 refused, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
    except RingspanError as error:
        _exit(2, str(error))
    except _ClickException as error:
        if not error.format_message():  # a command without arguments has shown its help
            sys.exit(2)
        _exit(2, error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        _exit(130, "interrupted")
    except RuntimeError as error:
        _exit(1, str(error))
    sys.exit(code if isinstance(code, int) else 0)


def _exit(code: int, message: str) -> None:
    print(f"ringspan: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
