"""Ranks of a command: torchrun's, or new ones on this machine."""

import os
from collections.abc import Callable
from typing import Any

from ringspan.cli.checks import refuse_under_torchrun
from ringspan.cli.console import importing, say
from ringspan.core.errors import ConfigError
from ringspan.torch.runtime.environment import is_rank


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
            serve_forks(*forks)  # it gets ready while this process checks what is asked
        import torch

        from ringspan.torch.runtime.launch import launch

        if nproc is None:
            nproc = max(1, torch.cuda.device_count())
            check(nproc)
        given = arguments()
    say(f"starting {nproc} rank{'s' if nproc > 1 else ''}")
    return launch(function, nproc, *given, **launching)[0], True
