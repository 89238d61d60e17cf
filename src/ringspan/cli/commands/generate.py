"""``ringspan generate``: ask a model's folder, with a prompt as long as a book."""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import cache
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
    on_ranks,
)
from ringspan.cli.console import console, hush, say
from ringspan.core.errors import ConfigError
from ringspan.core.files.named import why_no_model
from ringspan.torch.runtime.environment import is_rank

if TYPE_CHECKING:
    from ringspan.generate.session import Answer, Observer, Session
    from ringspan.generate.settings import GenerateSettings

EPILOG = (
    "Example: ringspan generate runs/demo/model --prompt-file book.txt --nproc 4. "
    "On a cluster: torchrun --nnodes 2 --nproc-per-node 8 ... -m ringspan generate model --prompt-file book.txt"
)


def command(
    model: Annotated[
        Path,
        typer.Argument(
            help="Folder of a model or adapter, and its tokenizer.", show_default=False
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option(help="The prompt; - reads standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="Text file with the prompt; - reads standard input."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 200,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sample at this temperature; below 1 favours likely tokens."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the likeliest tokens with this probability in all."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the K likeliest tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    dtype: Dtype = "auto",
    cache_dtype: CacheDtype = "auto",
    nproc: Nproc = None,
    tp: Tp = 1,
    weights: Weights = "auto",
    prefill_tokens: PrefillTokens = None,
    load_cache: Annotated[
        Path | None, typer.Option(help="Continue the text of a folder of --save-cache.")
    ] = None,
    save_cache: Annotated[
        Path | None,
        typer.Option(help="Save the cache, without the last token, in a new folder."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Answer line by line until Ctrl-D, keeping the cache."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read a prompt on a ring of processes, and print the model's continuation.

    Takes the most likely token; samples if --temperature, --top-p or --top-k is given.
    """
    from ringspan.generate.settings import GenerateSettings

    settings = GenerateSettings(
        folder=str(model),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        dtype=dtype,
        cache_dtype=cache_dtype,
        tp=tp,
        weights=weights,
        prefill_tokens=prefill_tokens,
        load_cache=None if load_cache is None else str(load_cache),
        save_cache=None if save_cache is None else str(save_cache),
    )
    check_folder(model)
    _check_prompt(prompt, prompt_file, chat, as_json)
    has_prompt = prompt is not None or prompt_file is not None
    text = (lambda: prompt_text(prompt, prompt_file)) if has_prompt else lambda: None
    answer, is_first = run(settings, text, nproc, as_json, chat)
    if is_first and as_json:
        assert answer is not None, "a chat has no --json"
        print(json.dumps(asdict(answer)))


def check_folder(model: Path) -> None:
    if not model.is_dir():
        raise ConfigError(
            f"{model}: there is no such folder; give one with a model and its tokenizer"
        )
    if reason := why_no_model(model):
        raise ConfigError(f"{model}: {reason}")


def _check_prompt(
    prompt: str | None, file: Path | None, chat: bool, as_json: bool
) -> None:
    given = [value for value in (prompt, file) if value is not None]
    if len(given) > 1 or not (given or chat):
        raise ConfigError("give either --prompt or --prompt-file")
    if chat and "-" in map(str, given):
        raise ConfigError(
            "--chat reads its lines from standard input; give the first prompt in a file"
        )
    if chat and as_json:
        raise ConfigError(
            "--json prints one answer, and --chat has many; leave one out"
        )


def prompt_text(
    prompt: str | None, file: Path | None, option: str = "--prompt-file"
) -> str:
    """Return the prompt from the option, a file or standard input; raise ConfigError if it is empty or not UTF-8."""
    name = "--prompt" if file is None else f"{option} {file}"
    try:
        if "-" in (prompt, str(file)):
            name, text = "standard input", sys.stdin.buffer.read().decode("utf-8-sig")
        else:
            text = prompt if file is None else file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: is not UTF-8 text (byte {error.start}); convert it"
        ) from error
    if not text:
        raise ConfigError(f"{name}: the prompt is empty; at least one token is needed")
    return text


def run(
    settings: "GenerateSettings", text: Callable[[], str | None], nproc: int | None, quiet: bool = False,
    chat: bool = False,
) -> "tuple[Answer | None, bool]":  # fmt: skip
    """Generate or chat on ranks; return rank 0's answer, None in a chat, and True on rank 0.

    Under torchrun, rank 0 reads and tokenizes the prompt for all. Otherwise it is read before ranks start.
    """
    under_torchrun, text = is_rank(), cache(text)
    if not under_torchrun:
        if nproc is not None:
            settings.check_ranks(nproc)
        text()

    def found() -> tuple[str | None, Any]:
        return text(), prompt_ids(settings, text(), chats=chat)

    def arguments() -> tuple[Any, ...]:
        if under_torchrun:
            from ringspan.torch.engine.transport.collectives import from_first_rank

            prompt, ids = from_first_rank(found)
        else:
            prompt, ids = found()
        return (settings, prompt, pipe) if chat else (settings, ids, quiet)

    with _standard_input() if chat and not under_torchrun else nullcontext() as pipe:
        ranks = chat_rank if chat else generate_rank
        return on_ranks(
            ranks,
            arguments,
            nproc,
            settings.check_ranks,
            forks=("ringspan.generate.session",),
        )


@contextmanager
def _standard_input() -> Iterator[str]:
    """Yield a named pipe fed from standard input, which local ranks lack."""
    with tempfile.TemporaryDirectory(prefix="ringspan-") as folder:
        pipe = os.path.join(folder, "lines")
        os.mkfifo(pipe)

        def copy() -> None:
            with suppress(OSError), open(pipe, "wb", buffering=0) as file:
                while data := os.read(0, 1 << 16):
                    file.write(data)

        threading.Thread(target=copy, daemon=True).start()
        yield pipe


def prompt_ids(
    settings: "GenerateSettings",
    text: str | None,
    most: int | None = None,
    *,
    chats: bool = False,
) -> Any:
    """Tokenize at most ``most`` tokens and check that they fit the model; return no ids for a chat without a prompt."""
    import numpy as np

    from ringspan.generate.folder import check_ids, load_config, load_tokenizer

    hush()
    config = load_config(settings)
    tokenizer = load_tokenizer(settings.folder, config, chats=chats)
    if text is None:
        return np.array([])
    # Only the beginning of a text gets the tokenizer's special tokens, not its continuation.
    is_beginning = settings.load_cache is None
    ids = tokenizer(text, add_special_tokens=is_beginning).input_ids[:most]
    check_ids(ids, settings, config)
    return np.array(ids)


def generate_rank(settings: "GenerateSettings", ids: Any, quiet: bool) -> "Answer":
    with _session(settings, quiet) as model:
        return model.answer_once(ids.tolist())


def chat_rank(
    settings: "GenerateSettings", first: str | None, pipe: str | None
) -> None:
    """Run a rank's part of a chat, which rank 0 reads from a named pipe or standard input."""
    import torch.distributed as dist

    from ringspan.generate.session import converse

    descriptor = None
    if dist.get_rank() == 0:
        descriptor = 0 if pipe is None else os.open(pipe, os.O_RDONLY)
    with _session(settings, quiet=False) as model:
        converse(model, first, descriptor)


@contextmanager
def _session(settings: "GenerateSettings", quiet: bool) -> "Iterator[Session]":
    import torch.distributed as dist

    from ringspan.generate.folder import load_config, load_tokenizer
    from ringspan.generate.session import Observer, session

    hush()
    config = load_config(settings)
    tokenizer = load_tokenizer(settings.folder, config)
    shown = _watched(quiet) if dist.get_rank() == 0 else nullcontext(Observer())
    with shown as observer, session(settings, config, tokenizer, observer) as model:
        yield model


@contextmanager
def _watched(quiet: bool) -> "Iterator[Observer]":
    """Yield an observer that shows progress on standard error, and writes the answer to standard output as it comes."""
    from ringspan.generate.session import Observer

    out = console(stderr=True)
    status = out.status("starting")
    wrote = False

    def read(tokens: int, total: int) -> None:
        if out.is_terminal:
            status.update(f"read {tokens:,} of {total:,} tokens")
        elif tokens < total or shown[0]:
            shown[0] = True
            say(f"read {tokens:,} of {total:,} tokens")

    def write(text: str) -> None:
        nonlocal wrote
        status.stop()
        if not quiet:
            wrote = True
            sys.stdout.write(text)
            sys.stdout.flush()

    def asks() -> None:
        status.stop()
        print("> ", end="", file=sys.stderr, flush=True)

    def refused(why: str) -> None:
        status.stop()
        say(f"ringspan: {why}")

    shown = [False]  # a prompt that is read in one chunk needs no line
    status.start()
    try:
        yield Observer(status.update, read, write, asks, refused)
    finally:
        status.stop()
        if wrote:
            sys.stdout.write("\n")
            sys.stdout.flush()
