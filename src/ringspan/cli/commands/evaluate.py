"""``ringspan eval``: does a model answer from all of its context?"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspan.cli.checks import (
    AsJson,
    CacheDtype,
    Dtype,
    Nproc,
    PrefillTokens,
    Tp,
    Weights,
    check_folder,
    check_picture,
    on_ranks,
)
from ringspan.cli.console import console, hush, say, table
from ringspan.core.errors import ConfigError
from ringspan.core.messages.extras import require
from ringspan.evaluate.settings import (
    PERPLEXITY,
    EvalSettings,
    HarnessSettings,
    local_folder,
)
from ringspan.evaluate.tasks import TASKS, Task

if TYPE_CHECKING:
    from ringspan.evaluate.runner import EvalObserver

app = typer.Typer(
    help="Measure whether a model uses its context, at any length, on a ring of processes.",
    no_args_is_help=True,
    add_completion=False,
    epilog="Example: ringspan eval lines runs/demo/model --lengths 1024,4096 --nproc 2 --page lines.html",
)

Models = Annotated[
    list[str],
    typer.Argument(
        help="Folders of models with their tokenizers, or names on the Hub.",
        show_default=False,
    ),
]
Lengths = Annotated[
    str,
    typer.Option(
        help="Lengths to test, in tokens of prompt and answer, separated by commas."
    ),
]
Depths = Annotated[
    str,
    typer.Option(
        help="Positions of the needle: 0 is the beginning of the text, 1 its end."
    ),
]
Items = Annotated[int, typer.Option(help="Questions per length and depth.")]
Seed = Annotated[int, typer.Option(help="Seed of the questions.")]
Needles = Annotated[int, typer.Option(help="Number of values to find.")]
Distractors = Annotated[
    int, typer.Option(help="Number of needles that the question does not ask for.")
]
Text = Annotated[
    list[str] | None,
    typer.Option(help="Text file to use, not Python's own documentation; repeatable."),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Do not use the tokenizer's chat template.")
]
Out = Annotated[
    Path,
    typer.Option(help="Folder of the records; an interrupted run resumes from them."),
]
Picture = Annotated[
    Path | None, typer.Option(help="Draw the result into this .png or .svg file.")
]
Page = Annotated[
    Path | None,
    typer.Option(help="Write pictures and tables of all models into this HTML file."),
]


def _command(task: Task) -> Callable[..., None]:
    """Return a task's command: all options of ``_evaluate`` except those without a meaning for the task."""

    def command(
        models: Models,
        lengths: Lengths = "1024,2048,4096",
        depths: Depths = "0,0.25,0.5,0.75,1",
        items: Items = 20,
        seed: Seed = 0,
        needles: Needles = task.needles or 1,
        distractors: Distractors = 0,
        text: Text = None,
        plain: Plain = False,
        dtype: Dtype = "auto",
        cache_dtype: CacheDtype = "auto",
        nproc: Nproc = None,
        tp: Tp = 1,
        weights: Weights = "auto",
        prefill_tokens: PrefillTokens = None,
        out: Out = Path("runs/eval"),
        picture: Picture = None,
        page: Page = None,
        as_json: AsJson = False,
    ) -> None:
        """Evaluate the task; replaced below by the task's own description, which is the command's help."""
        _evaluate(
            task.name,
            models,
            nproc,
            out,
            picture,
            page,
            as_json,
            lengths=_numbers("lengths", lengths, int),
            depths=_numbers("depths", depths, float),
            items=items,
            seed=seed,
            needles=needles if task.needles else None,
            distractors=distractors,
            text=tuple(text or ()),
            plain=plain,
            dtype=dtype,
            cache_dtype=cache_dtype,
            tp=tp,
            weights=weights,
            prefill_tokens=prefill_tokens,
        )

    import inspect

    left_out = {
        *([] if task.has_depth else ["depths"]),
        *([] if task.needles else ["needles", "distractors"]),
        *([] if task.needs_text else ["text"]),
    }
    signature = inspect.signature(command)
    kept = [
        parameter
        for name, parameter in signature.parameters.items()
        if name not in left_out
    ]
    command.__signature__ = signature.replace(parameters=kept)  # pyright: ignore[reportFunctionMemberAccess]
    command.__doc__ = task.about
    return command


def perplexity(
    models: Models,
    length: Annotated[int, typer.Option(help="Tokens of each document.")] = 4096,
    items: Annotated[int, typer.Option(help="Number of documents at most, the longest first.")] = 8,
    text: Text = None, dtype: Dtype = "auto", nproc: Nproc = None, tp: Tp = 1, out: Out = Path("runs/eval"),
    picture: Picture = None, page: Page = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Loss by position in long documents, in nats per token and bits per byte: does more context help?"""
    _evaluate(
        PERPLEXITY,
        models,
        nproc,
        out,
        picture,
        page,
        as_json,
        lengths=(length,),
        items=items,
        text=tuple(text or ()),
        dtype=dtype,
        tp=tp,
    )


for _task in TASKS.values():
    app.command(
        _task.name,
        epilog=f"Example: ringspan eval {_task.name} model tuned-model --lengths 4096,65536 --nproc 8 --page page.html",
    )(_command(_task))
app.command(
    PERPLEXITY,
    epilog="Example: ringspan eval perplexity model --length 65536 --nproc 8 --page page.html",
)(perplexity)


@app.command(
    epilog="Example: ringspan eval harness model --tasks niah_single_1,arc_easy --nproc 8 --json"
)
def harness(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder of the model and its tokenizer, or a name on the Hub."
        ),
    ],
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks or groups of lm-eval, separated by commas.", show_default=False
        ),
    ],
    include: Annotated[
        Path | None, typer.Option(help="Folder with definitions of further tasks.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Items per task at most.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask through the tokenizer's chat template.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of examples and samples; default: lm-eval's own."),
    ] = None,
    dtype: Dtype = "auto",
    nproc: Nproc = None,
    tp: Tp = 1,
    out: Out = Path("runs/eval"),
    as_json: AsJson = False,
) -> None:
    """Any tasks of lm-evaluation-harness, at full length on the ring."""
    require("ringspan eval harness", "lm_eval")

    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if include is not None and not include.is_dir():
        raise ConfigError(
            f"--include {include}: there is no such folder; give one with lm-eval's task files"
        )
    check_folder("--out", out)
    settings = HarnessSettings(
        folder=model,
        tasks=names,
        include=None if include is None else str(include.absolute()),
        limit=limit,
        num_fewshot=num_fewshot,
        chat=chat,
        seed=seed,
        dtype=dtype,
        tp=tp,
    )
    if nproc is not None:  # before a model is downloaded
        settings.generating().check_ranks(nproc)
    asked = replace(settings, folder=local_folder(model)), str(out.absolute())
    check = settings.generating().check_ranks
    found, is_first = on_ranks(
        harness_rank, lambda: asked, nproc, check, forks=("ringspan.evaluate.runner",)
    )
    if not is_first:
        return
    result = {**found, "model": model}
    if as_json:
        print(json.dumps(result))
        return

    rows = [
        [
            row["name"],
            row["metric"],
            f"{row['value']:.4f}",
            "" if row["items"] is None else str(row["items"]),
        ]
        for row in result["rows"]
    ]
    table(
        console(),
        f"lm-eval: {model}",
        ["task", "metric", "value", "items"],
        rows,
        numbers=2,
    )


def harness_rank(settings: "HarnessSettings", out: str) -> dict[str, Any] | None:
    from ringspan.evaluate.harness.run import run_harness

    hush()
    return run_harness(settings, Path(out))


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part.strip().replace("_", "")) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--{name} {text}: give numbers separated by commas, such as 1024,4096"
        ) from error


def _evaluate(
    task: str, models: list[str], nproc: int | None, out: Path, picture: Path | None, page: Path | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Check a command's options, evaluate its models on ranks, and write and print the results on rank 0."""
    if len(set(models)) < len(models):
        raise ConfigError(f"{' '.join(models)}: the same model twice; name each once")
    _check_outputs(out, picture, page)
    every = [EvalSettings(folder=model, task=task, **options) for model in models]
    if nproc is not None:
        for settings in every:
            settings.generating().check_ranks(nproc)
    from ringspan.report.evaluation import save_picture, short_names, write_page

    results: list[Any]
    local = [
        replace(settings, folder=local_folder(settings.folder)) for settings in every
    ]
    results, is_first = run(local, str(out.absolute()), nproc, short_names(models))
    if not is_first:
        return
    for result, model in zip(results, models, strict=True):
        result["model"] = model
    if picture is not None:
        save_picture(results, picture)
    if page is not None:
        about = perplexity.__doc__ if task == PERPLEXITY else TASKS[task].about
        write_page(results, page, shlex.join(["ringspan", *sys.argv[1:]]), about or "")
    if as_json:
        print(json.dumps(merged(results)))
    else:
        _print(results, picture, page)


def _check_outputs(out: Path, picture: Path | None, page: Path | None) -> None:
    """Raise ConfigError for a file or a folder that the results could not be written to."""
    if picture is not None:
        require("--picture", "matplotlib")
        check_picture(picture, ".png", ".svg")
    if page is not None:
        if page.suffix != ".html" or page.is_dir():
            raise ConfigError(f"--page {page}: give a file whose name ends in .html")
        check_folder("--page", page.parent)
    check_folder("--out", out)


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    if len(results) == 1:
        return results[0]
    rows = [
        {"model": result["model"], **row}
        for result in results
        for row in result["rows"]
    ]
    skipped = [
        {"model": result["model"], **row}
        for result in results
        for row in result["skipped"]
    ]
    own = {
        "model": [result["model"] for result in results],
        "records": [result["records"] for result in results],
    }
    return {**results[0], **own, "rows": rows, "skipped": skipped}


def run(
    every: list[EvalSettings], out: str, nproc: int | None, names: list[str]
) -> tuple[list[dict[str, Any]], bool]:
    def arguments() -> tuple[list[EvalSettings], str, list[str]]:
        from ringspan.generate.folder import load_config, load_tokenizer

        for settings in every:
            load_tokenizer(
                settings.folder,
                load_config(settings.generating()),
                chats=settings.chats,
            )
        return every, out, names

    check = every[0].generating().check_ranks
    return on_ranks(
        evaluate_ranks, arguments, nproc, check, forks=("ringspan.evaluate.runner",)
    )


def evaluate_ranks(
    every: list[EvalSettings], out: str, names: list[str] | None = None
) -> list[dict[str, Any]]:
    """Evaluate models, each shown by its name, or else its folder."""
    import torch.distributed as dist

    from ringspan.evaluate.runner import EvalObserver, evaluate_rank, plans

    hush()
    results = []
    with (
        console(stderr=True).status("reading the texts")
        if dist.get_rank() == 0
        else nullcontext()
    ):
        found = plans(every)
    for settings, planned, name in zip(
        every, found, names or [each.folder for each in every], strict=True
    ):
        shown = _watched(name) if dist.get_rank() == 0 else nullcontext(EvalObserver())
        with shown as observer:
            results.append(evaluate_rank(settings, planned, out, observer))
    return results


@contextmanager
def _watched(name: str) -> "Iterator[EvalObserver]":
    """Yield an observer that shows a model's progress: a bar on a terminal, lines elsewhere."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from ringspan.evaluate.runner import EvalObserver

    out = console(stderr=True)
    if not out.is_terminal:

        def did(done: int, total: int, what: str) -> None:
            say(f"{name}: item {done} of {total}: {what}")

        yield EvalObserver(did=did, noticed=lambda line: say(f"{name}: {line}"))
        return
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out) as progress:
        task = progress.add_task("starting", total=None)

        def moved(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        def read(tokens: int, total: int) -> None:
            progress.update(task, description=f"read {tokens:,} of {total:,} tokens")

        def doing(what: str) -> None:
            progress.update(task, description=what)

        yield EvalObserver(
            doing=doing, read=read, did=moved, noticed=progress.console.print
        )


def _print(results: list[dict[str, Any]], *files: Path | None) -> None:
    from ringspan.report.evaluation import cells

    out = console()
    for result in results:
        headers, rows = cells(result["rows"])
        table(
            out,
            f"{result['task']}: {result['model']}",
            headers,
            rows,
            numbers=len(headers) - 1,
        )
        for each in result["skipped"]:
            out.print(
                f"skipped: {each['length']:,} tokens, {each['why']}", soft_wrap=True
            )
    for file in files:
        if file is not None:
            out.print(f"wrote {file}", soft_wrap=True)
