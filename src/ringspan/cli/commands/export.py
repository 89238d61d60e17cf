"""``ringspan export``: a training checkpoint as a folder of transformers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ringspan.cli.checks import AsJson
from ringspan.cli.console import console
from ringspan.core.errors import ConfigError
from ringspan.core.messages.units import shown_bytes

EPILOG = "Example: ringspan export runs/long latest exported; then AutoModelForCausalLM.from_pretrained('exported')"


def command(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    step: Annotated[str, typer.Argument(help="Step of a checkpoint, or latest.")],
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    max_shard_size: Annotated[str, typer.Option(help="Largest file, such as 2GB.")] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of a run as an ordinary Hugging Face folder, tensor slice by tensor slice, in this process.

    The checkpoint is verified first. The folder appears only when it is complete.
    """
    if step != "latest" and not step.isdecimal():
        raise ConfigError(f"STEP = {step!r}: give the number of a step, or latest")
    with console(stderr=True, quiet=as_json).status("reading the run") as status:
        from ringspan.train.run_folder.export import export_checkpoint

        at = None if step == "latest" else int(step)
        found, num_bytes = export_checkpoint(run, at, folder, max_shard_size=max_shard_size, doing=status.update)
    if as_json:
        print(json.dumps({"step": found, "folder": str(folder), "bytes": num_bytes}))
    else:
        print(f"wrote {folder}: step {found}, {shown_bytes(num_bytes)} of weights")
