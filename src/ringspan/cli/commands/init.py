"""``ringspan init``: a commented configuration to begin with."""

from pathlib import Path
from typing import Annotated

import typer

from ringspan.core.errors import ConfigError

EPILOG = "Example: ringspan init finetune.toml"


def command(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("train.toml"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file.")
    ] = False,
) -> None:
    """Write a TOML file for `ringspan train` with every key, its default and its meaning."""
    from ringspan.train.config.template import config_template

    if file.is_dir():
        raise ConfigError(
            f"{file}: is a folder; give the name of a file in it, such as {file / 'train.toml'}"
        )
    try:
        with file.open("w" if force else "x", encoding="utf-8") as opened:
            opened.write(config_template(str(file)))
    except FileExistsError:
        raise ConfigError(
            f"{file}: is there already; give another name, or --force to replace it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror}); give another name"
        ) from error
    print(
        f"wrote {file}; set model.path and data.paths in it, then: ringspan train {file} --nproc 8"
    )
