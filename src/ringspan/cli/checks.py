"""Options that several commands share, checks of input before minutes are spent on it, and starting of ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ringspan.cli.console import importing, say
from ringspan.core.costs import DTYPE_BYTES
from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.files.named import why_no_folder
from ringspan.core.messages.units import shown_bytes
from ringspan.torch.runtime.environment import is_rank

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object.")
]
CacheDtype = Annotated[
    str,
    typer.Option(
        help="Dtype of cached keys and values: auto (the model's), float32, bfloat16, fp8, int8 or int4."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Dtype of the model: auto (as saved), float32 or bfloat16.")
]
LocalRanks = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="Local processes; default: one per CUDA device, else two. Not under torchrun.",
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        help="Local processes to start; default: one per CUDA device, else one. Not under torchrun."
    ),
]
PrefillTokens = Annotated[
    int | None,
    typer.Option(help="Prompt tokens that a rank reads at once; default: 4096."),
]
Tp = Annotated[
    int,
    typer.Option(help="Ranks that split heads and weights; the others form the ring."),
]
Weights = Annotated[
    str,
    typer.Option(
        help="whole on each rank, sharded (gathered for each token), or auto."
    ),
]


MOST_RANKS: Final = 1024


def refuse_under_torchrun(**options: object) -> None:
    """Raise ConfigError for given options on starting processes if torchrun has started them."""
    for name, given in options.items():
        if given is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} {given} under torchrun, which has started the processes; leave it out"
            )


def check_dtype(dtype: str) -> None:
    import torch

    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(
            f"--dtype {dtype!r} is not supported; use float32 or bfloat16"
        )
    if dtype == "float16" and not torch.cuda.is_available():
        raise UnsupportedError(
            "--dtype float16 on CPU is not supported; use float32 or bfloat16"
        )


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    from ringspan.core.arguments import check_shapes

    check_shapes((1, heads, 1, head_dim), *2 * [(1, kv_heads, 1, head_dim)])


def check_memory(what: str, num_bytes: int) -> None:
    """Raise ConfigError if ``num_bytes``, a part of the need, exceeds host and device memory together."""
    import torch

    from ringspan.torch.runtime.host import host_memory_bytes

    has = host_memory_bytes()
    if torch.cuda.is_available():
        has = max(has, torch.cuda.mem_get_info()[1])
    if num_bytes > has:
        raise ConfigError(
            f"{what}: needs more than {shown_bytes(num_bytes)}, this machine has {shown_bytes(has)}"
        )


def check_picture(picture: Path, *endings: str) -> None:
    if picture.suffix not in endings:
        *others, last = endings
        shown = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"--picture {picture}: end the name in {shown}")
    if not picture.parent.is_dir():
        raise ConfigError(
            f"--picture {picture}: there is no folder {picture.parent}; create it"
        )
    if picture.is_dir():
        raise ConfigError(
            f"--picture {picture}: is a folder; give the name of a file in it"
        )
    check_folder("--picture", picture.parent)


def check_folder(option: str, folder: Path) -> None:
    if reason := why_no_folder(folder):
        raise ConfigError(
            f"{option} {folder}: cannot be written into ({reason}); choose another folder"
        )


def on_ranks(
    function: Callable[..., Any],
    arguments: Callable[[], tuple[Any, ...]],
    nproc: int | None,
    check: Callable[[int], object] = lambda nproc: None,
    *,
    forks: tuple[str, ...] = (),
    **launching: Any,
) -> tuple[Any, bool]:
    """Run ``function(*arguments())`` on each rank; return rank 0's result, and True there.

    ``arguments`` is called on each of torchrun's ranks once they have met, or here before local ones start. ``check``
    gets the number of ranks (default: one per CUDA device); ``forks`` are modules that local ranks need, ``launching``
    options of ``launch``.
    """
    if is_rank():
        refuse_under_torchrun(nproc=nproc)
        check(int(os.environ["WORLD_SIZE"]))
        if os.environ["RANK"] == "0":
            say("importing PyTorch and transformers")
        import torch.distributed as dist

        from ringspan.torch.runtime.launch import join

        join()
        try:
            return function(*arguments()), dist.get_rank() == 0
        finally:
            dist.destroy_process_group()
    if nproc is not None:
        if nproc < 1:
            raise ConfigError(f"--nproc {nproc}: at least one process is needed")
        check(nproc)
    from ringspan.torch.runtime.forks import serve_forks

    with importing():
        if forks:
            serve_forks(
                *forks
            )  # the server imports while this process checks the input
        import torch

        from ringspan.torch.runtime.launch import launch

        if nproc is None:
            nproc = max(1, torch.cuda.device_count())
            check(nproc)
        given = arguments()
    say(f"starting {nproc} rank{'s' if nproc > 1 else ''}")
    return launch(function, nproc, *given, **launching)[0], True
