"""``ringspan bench cache``: what a cache in fewer bits costs a model of yours on a text of yours."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ringspan.core.messages.units import shown_bytes

EPILOG = "Example: ringspan bench cache runs/demo/model --text-file book.txt --scored 512 --json"


def command(
    model: Annotated[Path, typer.Argument(help="Folder of the model and its tokenizer.", show_default=False)],
    text_file: Annotated[
        Path, typer.Option(help="The text; - reads standard input. The first tokens are read, the last scored.")
    ],
    dtypes: Annotated[
        str, typer.Option(help="Of the caches: float32, bfloat16, fp8, int8 or int4, with commas.")
    ] = "bfloat16,fp8,int8,int4",
    scored: Annotated[int, typer.Option(min=1, help="Tokens whose loss is compared.")] = 256,
    length: Annotated[int | None, typer.Option(min=3, help="Tokens of the text to take; default: all.")] = None,
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Processes in the ring.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """The loss of a text's last tokens over caches in fewer bits, against a cache in the model's own precision."""
    from ringspan.cli.commands.generate import check_folder, prompt_text
    from ringspan.cli.console import console, importing, table
    from ringspan.generate.settings import GenerateSettings

    check_folder(model)
    text = prompt_text(None, text_file, "--text-file")
    with importing(quiet=as_json):
        from ringspan.cli.commands.generate import prompt_ids
        from ringspan.measure.bench.cache import CacheCase, run
    case = CacheCase(
        folder=str(model),
        ranks=ranks,
        dtypes=tuple(dict.fromkeys(dtypes.split(","))),  # pyright: ignore[reportArgumentType]
        scored=scored,
    )
    ids = prompt_ids(GenerateSettings(folder=str(model), max_new_tokens=1), text, length)
    case.check_text(len(ids))
    with console(stderr=True, quiet=as_json).status(f"reading {len(ids):,} tokens twice per cache"):
        result = run(case, ids.tolist())
    if as_json:
        print(json.dumps(result))
        return
    rows = [
        [
            row["dtype"],
            f"{row['loss']:.4f}",
            f"{row['perplexity']:.4g}",
            f"{row['perplexity_change']:+.3%}",
            f"{row['logits_error']:.2%}",
            shown_bytes(row["cache_bytes_per_rank"]),
        ]
        for row in result["caches"]
    ]
    own = [f"{result['dtype']}, the model's", f"{result['loss']:.4f}", f"{result['perplexity']:.4g}", "", ""]
    rows.insert(0, [*own, shown_bytes(result["cache_bytes_per_rank"])])
    title = f"{result['tokens']:,} tokens, of which the last {scored:,} are scored"
    headers = ["cache", "loss", "perplexity", "change", "error of logits", "bytes per rank"]
    table(console(), title, headers, rows, numbers=len(headers))
