"""Global positions for decoders that number tokens from 0, which every rank would do for its own."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ringspan.torch.engine.attention.cached import current_turn
from ringspan.torch.model.layers.modules import Mixin, forward_of, mix_in

_POSITIONS = "position_ids"


def takes_positions(decoder: nn.Module) -> bool:
    return _takes_positions(forward_of(decoder))


# Every pass asks, and a signature takes as long as a small layer.
@lru_cache(maxsize=256)
def _takes_positions(function: Callable[..., Any]) -> bool:
    return _POSITIONS in inspect.signature(function).parameters


def numbers_itself(decoder: PreTrainedModel) -> nn.Module | None:
    """Return the position embedding of a decoder that takes no positions (BART); None unless exactly one."""
    found = [
        module
        for module in decoder.modules()
        if isinstance(module, nn.Embedding) and takes_positions(module)
    ]
    return found[0] if len(found) == 1 else None


def number_tokens(decoder: PreTrainedModel) -> None:
    """Make a decoder use global positions, in place, after the unused first rows of its table (RoBERTa)."""
    table: Any
    if not takes_positions(decoder) and (table := numbers_itself(decoder)) is not None:
        mix_in(table, _Told)
    _mix_in_offsets(decoder)
    # Passes look for these: a list saves each a walk through all modules.
    vars(decoder)["ring_numbering"] = [
        module for module in decoder.modules() if isinstance(module, _Told | _Behind)
    ]


def _mix_in_offsets(decoder: PreTrainedModel) -> None:
    table: Any
    for module in decoder.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            table = getattr(module, "position_embeddings", None)
            if isinstance(first := getattr(module, "padding_idx", None), int):
                if isinstance(table, nn.Embedding):
                    mix_in(table, _Behind, offset=first + 1)
                # The module is the table itself (Kosmos 2.5).
                elif takes_positions(module) and table is None:
                    mix_in(module, _Counting, offset=first + 1)


def counts_real_tokens(decoder: nn.Module) -> bool:
    """Return True if positions count from the first real token (OPT by mask, RoBERTa by pad token)."""
    code = inspect.unwrap(forward_of(decoder)).__code__
    return "cumsum" in code.co_names or skipped_token(decoder) is not None


def _mixed_in(decoder: nn.Module, kind: type[Mixin]) -> Any:
    """Return the first module that ``number_tokens`` has given this mixin; None without one."""
    found = vars(decoder).get("ring_numbering")
    parts = decoder.modules() if found is None else found
    return next((module for module in parts if isinstance(module, kind)), None)


def first_position(decoder: nn.Module) -> int:
    table = _mixed_in(decoder, _Behind)
    return 0 if table is None else table.offset


def skipped_token(decoder: nn.Module) -> int | None:
    """Return the pad token that a decoder skips when counting positions; None if it counts all."""
    table = _mixed_in(decoder, _Behind)
    return None if table is None else table.offset - 1


@contextmanager
def told(decoder: nn.Module, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a decoder's arguments: with positions (B, T), or without while its embedding holds them."""
    if takes_positions(decoder):
        yield given
        return
    table = _mixed_in(decoder, _Told)
    positions = given[_POSITIONS]
    others = {name: value for name, value in given.items() if name != _POSITIONS}
    # With ALiBi only attention uses positions.
    if table is None:
        yield others
        return
    table.ring_positions = positions
    try:
        yield others
    finally:
        table.ring_positions = None


class _Told(Mixin):
    ring_positions: Tensor | None = None

    def forward(self: Any, first: object, *args: object, **kwargs: object) -> Tensor:
        positions = self.ring_positions
        if positions is None:
            return super().forward(first, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        made = super().forward(first, position_ids=positions.flatten().long())  # pyright: ignore[reportAttributeAccessIssue]
        return made.view(*positions.shape, -1)


class _Behind(Mixin):
    """Mixin that ``number_tokens`` adds to a learned table whose first ``offset`` rows are unused."""

    offset: int

    def rows(self, positions: Tensor) -> Tensor:
        """Return the table's rows for positions; over a cache, the positions given are rows already."""
        return positions if current_turn() is not None else positions + self.offset

    def forward(self, positions: Tensor) -> Tensor:
        return super().forward(self.rows(positions))  # pyright: ignore[reportAttributeAccessIssue]


class _Counting(_Behind):
    def forward(self, *args: Any, position_ids: Tensor, **kwargs: Any) -> Tensor:
        kwargs["position_ids"] = self.rows(position_ids)
        return super(_Behind, self).forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
