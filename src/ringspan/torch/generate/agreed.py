"""Decisions that ranks share while generating: random numbers, clocks, stopping criteria."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import StoppingCriteria, StoppingCriteriaList

from ringspan.torch.model.consistency.calls import Call, hear_all

_drawing: ContextVar[frozenset[dist.ProcessGroup]] = ContextVar(
    "drawing", default=frozenset()
)


@contextmanager
def first_ranks_numbers(
    groups: Sequence[dist.ProcessGroup], device: torch.device
) -> Iterator[None]:
    """Make all ranks draw the first rank's random numbers, then resume their own; nested uses join."""
    if _drawing.get().issuperset(groups):
        yield
        return
    is_first = all(dist.get_rank(group) == 0 for group in groups)
    before = [get() for get, _ in _states(device)]
    take_first_ranks_numbers(groups, device)
    token = _drawing.set(_drawing.get().union(groups))
    try:
        yield
    finally:
        _drawing.reset(token)
        if not is_first:
            for (_, put), state in zip(_states(device), before, strict=True):
                put(state)


def take_first_ranks_numbers(
    groups: Sequence[dist.ProcessGroup], device: torch.device
) -> None:
    for get, put in _states(device):
        first = get().clone().to(device)
        for group in groups:
            dist.broadcast(first, group_src=0, group=group)
        put(first.cpu())


def _states(
    device: torch.device,
) -> list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    states: list[Any] = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type == "cuda":
        states.append(
            (
                lambda: torch.cuda.get_rng_state(device),
                lambda state: torch.cuda.set_rng_state(state, device),
            )
        )
    return states


class AgreedCriteria(StoppingCriteria):
    """User's criterion decided by the first rank for all: clocks and files may differ."""

    def __init__(self, criterion: Callable[..., object], mesh: DeviceMesh) -> None:
        self._criterion, self._mesh = criterion, mesh
        if (ends := getattr(criterion, "eos_token_id", None)) is not None:
            self.eos_token_id = ends

    @staticmethod
    def of(criteria: Sequence[Any], mesh: DeviceMesh) -> StoppingCriteriaList:
        return StoppingCriteriaList(AgreedCriteria(each, mesh) for each in criteria)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Any:
        mine = self._criterion(input_ids, scores, **kwargs)
        if not isinstance(mine, Tensor):
            mine = torch.full((len(input_ids),), bool(mine), device=input_ids.device)
        call = Call("a stopping criterion", said=mine.tolist())
        first = hear_all(self._mesh, call, between_replicas=False)[0]
        return torch.tensor(first, dtype=torch.bool, device=input_ids.device)
