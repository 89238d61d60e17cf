"""``ringspan export``: a training checkpoint as a folder of transformers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ringspan.cli.console import console
from ringspan.core.errors import ConfigError
from ringspan.core.messages.units import shown_bytes

EPILOG = "Example: ringspan export runs/long latest exported; then AutoModelForCausalLM.from_pretrained('exported')"


def command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    step: Annotated[str, typer.Argument(help="The step of a checkpoint, or latest.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of a file, such as 2GB.")] = "5GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Write a checkpoint of a run as an ordinary Hugging Face folder, in this process, a piece of a tensor at a time.

    The checkpoint is checked first. The folder is complete or not there at all.
    """

    if step != "latest" and not step.isdecimal():
        raise ConfigError(f"STEP = {step!r}: give the number of a step, or latest")
    with console(stderr=True, quiet=as_json).status("reading the run") as status:
        from ringspan.train.run_folder.convert import export_checkpoint

        found, num_bytes = export_checkpoint(
            run,
            None if step == "latest" else int(step),
            folder,
            max_shard_size=max_shard_size,
            doing=lambda what: status.update(what),
        )
    if as_json:
        print(json.dumps({"step": found, "folder": str(folder), "bytes": num_bytes}))
    else:
        print(f"wrote {folder}: step {found}, {shown_bytes(num_bytes)} of weights")
