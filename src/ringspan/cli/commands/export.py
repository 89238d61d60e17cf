"""``ringspan export``: a training checkpoint as a folder of transformers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ringspan.cli.checks import AsJson
from ringspan.cli.console import console, hush
from ringspan.core.errors import ConfigError
from ringspan.core.messages.units import shown_bytes

EPILOG = (
    "Examples: ringspan export runs/long latest exported; ringspan export --merge adapter merged; then "
    "AutoModelForCausalLM.from_pretrained('exported')"
)


def command(
    run: Annotated[
        Path, typer.Argument(help="Folder of the run; with --merge, of an adapter.")
    ],
    step: Annotated[
        str,
        typer.Argument(
            help="Step of a checkpoint, or latest; with --merge, the folder to create."
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder to create; left out with --merge.", show_default=False
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Merge an adapter into its base model, in memory."
        ),
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest file, such as 2GB.")
    ] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of a run, or an adapter with its base, as an ordinary Hugging Face folder in this process.

    A checkpoint is verified first and written tensor slice by tensor slice. The folder appears only when it is
    complete.
    """
    if merge != (folder is None):
        raise ConfigError("give RUN STEP FOLDER, or --merge ADAPTER FOLDER")
    target = Path(step) if folder is None else folder
    if not merge and step != "latest" and not step.isdecimal():
        raise ConfigError(f"STEP = {step!r}: give the number of a step, or latest")
    with console(stderr=True, quiet=as_json).status("reading") as status:
        from ringspan.train.run_folder.export import export_checkpoint, export_merged

        hush()
        said = dict[str, str | int]()
        if merge:
            num_bytes = export_merged(
                run, target, max_shard_size=max_shard_size, doing=status.update
            )
        else:
            at = None if step == "latest" else int(step)
            said["step"], num_bytes = export_checkpoint(
                run, at, target, max_shard_size=max_shard_size, doing=status.update
            )
    if as_json:
        print(json.dumps(said | {"folder": str(target), "bytes": num_bytes}))
    else:
        what = "the merged model" if merge else f"step {said['step']}"
        print(f"wrote {target}: {what}, {shown_bytes(num_bytes)} of weights")
