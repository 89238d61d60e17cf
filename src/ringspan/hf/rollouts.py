"""Trainers that generate completions (GRPO, RLOO): counts are per replica, each ring asks once."""

import functools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate import utils
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import set_seed

from ringspan.core.errors import ConfigError, PeerMismatch
from ringspan.hf.config import RingConfig
from ringspan.torch.engine.transport.collectives import T, gather, gather_over
from ringspan.torch.generate.agreed import take_first_ranks_numbers
from ringspan.torch.runtime.mesh import text_groups

Failure = tuple[Callable[..., Any], Exception]  # a function, and what it raised

_GENERATION: Final = "VLLMGeneration"
_log: Final = logging.getLogger(__name__)


def count_generations(args: Any, replicas: int) -> None:
    """Set a generation's number of completions by replicas, while TRL counts ranks; ``steps_per_generation`` stays."""
    steps = getattr(args, "steps_per_generation", None)
    if steps is None:
        return
    size = args.per_device_train_batch_size * replicas * steps
    if size % args.num_generations:
        raise ConfigError(
            f"num_generations={args.num_generations} does not divide the {size} completions that are made at once, "
            f"per_device_train_batch_size {args.per_device_train_batch_size} x replicas {replicas} x "
            f"steps_per_generation {steps}; a ring is one process: change one of these"
        )
    groups, batch = (
        args.num_generations_eval or args.num_generations,
        args.per_device_eval_batch_size * replicas,
    )
    if (
        str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
        and batch % groups
    ):
        raise ConfigError(
            f"{groups} generations for each prompt of evaluation do not divide {batch}, per_device_eval_batch_size "
            f"{args.per_device_eval_batch_size} x replicas {replicas}; a ring is one process: change one of these"
        )
    if size != args.generation_batch_size and dist.get_rank() == 0:
        _log.warning("generation_batch_size is %d: a ring is one process", size)
    args.generation_batch_size = size


def share_rollouts(trainer: Any) -> None:
    """Share random numbers, completions and rewards of each ring's first rank within it; in place."""
    if not (hasattr(trainer, "num_generations") and hasattr(trainer, "reward_funcs")):
        return
    set_seed(trainer.args.seed + trainer.accelerator.process_index)
    mesh = trainer.ring_mesh
    if getattr(trainer, "rollout_func", None) is not None:  # RLOO has no such argument
        trainer.rollout_func = first_of_ring(trainer.rollout_func, mesh)
    trainer.ring_failures = []
    for place, function in enumerate(trainer.reward_funcs):
        if is_async(function):
            trainer.reward_funcs[place] = failing_later(function, trainer.ring_failures)
        elif not isinstance(function, nn.Module):
            trainer.reward_funcs[place] = first_of_ring(function, mesh, _rewards)


def _rewards(
    result: Iterable[float | None], num_completions: int
) -> list[float | None]:
    """Return rewards as a list; raise ValueError or TypeError unless each completion has a number or None."""
    rewards = list(result)
    torch.tensor(
        [math.nan if reward is None else reward for reward in rewards],
        dtype=torch.float32,
    )
    if len(rewards) != num_completions:
        raise ValueError(
            f"{len(rewards)} rewards for {num_completions} completions; it must return one for each"
        )
    return rewards


def first_of_ring(
    function: Callable[..., Any],
    mesh: DeviceMesh,
    checked: Callable[[Any, int], Any] | None = None,
) -> Callable[..., Any]:
    """Wrap a function so that a ring's ranks get its first rank's result, through ``checked(result, prompts)``."""

    @functools.wraps(function)
    def shared(*args: object, **kwargs: Any) -> object:
        result, failures = None, []
        try:
            result = function(*args, **kwargs)
            if checked is not None:
                result = checked(result, len(kwargs["prompts"]))
        except (
            Exception
        ) as raised:  # caught whatever its kind, since other ranks have to know
            failures.append((function, raised))
        raise_on_all(failures, mesh)
        return of_first(result, mesh)

    return shared


def failing_later(
    function: Callable[..., Any], failures: list[Failure]
) -> Callable[..., Any]:
    """Wrap an async reward function to note errors and return zeros: awaited in any order, it cannot tell others."""

    @functools.wraps(function)
    async def noting(*args: object, **kwargs: Any) -> list[float | None]:
        try:
            return _rewards(await function(*args, **kwargs), len(kwargs["prompts"]))
        except Exception as raised:  # caught whatever its kind, as above
            failures.append((function, raised))
            return [0.0] * len(kwargs["prompts"])

    return noting


def raise_on_all(failures: list[Failure], mesh: DeviceMesh) -> None:
    """Raise noted failures on every rank of all rings, and clear ``failures``."""
    named = [
        (getattr(function, "__name__", type(function).__name__), error)
        for function, error in failures
    ]
    reasons = [
        f"{name} raised on another rank: {type(error).__name__}: {error}"
        for name, error in named
    ]
    first = next((error for _, error in failures), None)
    failures.clear()
    reason = next(chain.from_iterable(gather_over(mesh, reasons)), None)
    if first is not None:
        raise first
    if reason is not None:
        raise PeerMismatch(reason)


def is_async(function: Callable[..., object]) -> bool:
    """Return True if TRL would await a reward function."""
    from trl.trainer.utils import is_async_callable

    return is_async_callable(function)


def of_first(thing: T, mesh: DeviceMesh) -> T:
    """Return the object of the ring's first rank, by pickle."""
    things = [thing]
    for group in text_groups(mesh):
        dist.broadcast_object_list(things, group_src=0, group=group)
    return things[0]


@contextmanager
def generation_of_rings(kind: type, ring: RingConfig) -> Iterator[None]:
    """Put our generation by vLLM under the name by which TRL's trainers make theirs."""
    names = {each.__module__ for each in kind.__mro__}
    if not any(hasattr(sys.modules[name], _GENERATION) for name in names):
        yield
        return
    # Imported here, since TRL may be missing.
    from ringspan.hf.vllm import RingVLLMGeneration, VLLMGeneration

    ours = functools.partial(RingVLLMGeneration, ring=ring)
    with _named(kind, {_GENERATION: VLLMGeneration}, {_GENERATION: ours}):
        yield


@contextmanager
def _named(kind: type, theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[None]:
    """Put functions of ours under the names that the modules of a trainer's classes call."""
    modules = {each.__module__ for each in kind.__mro__}
    found = [
        (vars(sys.modules[module]), name)
        for module in modules
        for name in ours
        if vars(sys.modules[module]).get(name) is theirs[name]
    ]
    for space, name in found:
        space[name] = ours[name]
    try:
        yield
    finally:
        for space, name in found:
            space[name] = theirs[name]


@contextmanager
def rollout_of_replica(trainer: Any) -> Iterator[None]:
    """Put our gathers under accelerate's names that TRL calls, and keep random numbers equal in a ring."""
    accelerator, mesh = trainer.accelerator, trainer.ring_mesh
    group = mesh.get_group("replicate")

    def tensors(tensor: Tensor) -> Tensor:
        return accelerator.gather(of_first(tensor, mesh))

    def objects(things: list[Any]) -> list[Any]:
        return [
            thing for part in gather(of_first(things, mesh), group) for thing in part
        ]

    ours = {"gather": tensors, "gather_object": objects}
    # Failures of a rollout that another error has ended.
    trainer.ring_failures.clear()
    with _named(type(trainer), {name: getattr(utils, name) for name in ours}, ours):
        yield
    if any(map(is_async, trainer.reward_funcs)):
        raise_on_all(trainer.ring_failures, mesh)
    take_first_ranks_numbers(text_groups(mesh), accelerator.device)
