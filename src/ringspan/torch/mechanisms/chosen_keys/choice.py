"""Choice of an index, passed from the index to attention and to layers that share it."""

import inspect
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringspan.core.geometry.layer_mask import CAUSAL
from ringspan.torch.engine.attention.cached import Turn, current_turn
from ringspan.torch.engine.attention.request import in_autocast
from ringspan.torch.engine.attention.traced import parts_of
from ringspan.torch.engine.recurrence.current import SequencePass, current_pass
from ringspan.torch.mechanisms.chosen_keys.cached import attend_to_cache
from ringspan.torch.mechanisms.chosen_keys.chosen import IndexInputs
from ringspan.torch.mechanisms.chosen_keys.index_loss import (
    is_learning,
    note_divergence,
)
from ringspan.torch.mechanisms.chosen_keys.indexed import indexed_attention
from ringspan.torch.mechanisms.chosen_keys.windows import Row
from ringspan.torch.model.attention.call import Rows
from ringspan.torch.model.attention.latents import absorbed_attention
from ringspan.torch.model.layers.modules import forward_of

CHOICES: Final = ("indices", "block_indices")
"""Arguments of an attention function that may hold a choice."""
_ROTATIONS: Final = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")


class Asked(NamedTuple):
    rows: list[Rows]
    ring: dist.ProcessGroup
    scale: float
    sinks: Tensor | None
    is_dense: bool
    """True if queries attend to all keys, while an index learns from it."""

    def options(self, rows: Rows, values: slice) -> dict[str, Any]:
        of_rows = {"mask": rows.mask, "layout": rows.layout, "values": values}
        return of_rows | {"scale": self.scale, "group": self.ring, "sinks": self.sinks}

    def attend(
        self, q: Tensor, latents: Tensor, choice: "Choice", values: slice
    ) -> Tensor:
        """Attend from q (B, H, T, D) to chosen latents (B, T, C); an index chooses first unless the choice is made."""
        index, chosen = choice.index, choice.chosen
        length = q.shape[2] * dist.get_world_size(self.ring)
        outs: list[Tensor] = []
        for number, rows in enumerate(self.rows):
            of_rows = given = None
            if index is None:
                given = chosen[number]
            else:
                of_rows = index.of_rows(rows.part)._replace(
                    topk=0 if self.is_dense else min(index.topk, length)
                )
            options = self.options(rows, values)
            out, found, loss = indexed_attention(
                q[rows.part], latents[rows.part], of_rows, given, **options
            )
            outs.append(out)
            if index is not None:
                chosen.append(found)
                note_divergence(index, loss)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def attend_heads(
        self, q: Tensor, kv: Tensor, choice: "Choice", values: slice
    ) -> Tensor:
        """Attend from q (B, H, T, D) to chosen keys and values (B, G, T, C), chosen for each key head or for all."""
        heads, outs = kv.shape[1], []
        for rows, chosen in zip(self.rows, choice.chosen, strict=True):
            of_heads = (
                chosen
                if chosen.ndim == 5
                else chosen[:, None].expand(-1, heads, -1, -1, -1)
            )
            of_queries = q[rows.part].unflatten(1, (heads, -1)).flatten(0, 1)
            given = (
                of_queries,
                kv[rows.part].flatten(0, 1),
                None,
                of_heads.flatten(0, 1),
            )
            out, _, _ = indexed_attention(*given, **self.options(rows, values))
            outs.append(out.unflatten(0, (-1, heads)).flatten(1, 2))
        return torch.cat(outs)


class AskedOfCache(NamedTuple):
    turn: Turn
    scale: float
    sinks: Tensor | None

    def attend(
        self, q: Tensor, latents: Tensor, choice: "Choice", values: slice
    ) -> Tensor:
        """Attend like ``Asked.attend``, to the latents that all ranks hold: this rank passes its share (B, M, C)."""
        q, latents = in_autocast(q, latents)
        given = None if choice.index is not None else choice.chosen[0]
        options = {"values": values, "scale": self.scale, "sinks": self.sinks}
        reach = self.turn.reaches[CAUSAL]
        out, found = attend_to_cache(
            self.turn, reach, q, latents.to(q.dtype), choice.index, given, **options
        )
        choice.chosen = [found]
        return out

    def attend_heads(
        self, q: Tensor, kv: Tensor, choice: "Choice", values: slice
    ) -> Tensor:
        """Attend like ``Asked.attend_heads``, to all ranks' keys and values: this one passes its share (B, G, M, C)."""
        heads, (chosen,) = kv.shape[1], choice.chosen
        of_heads = (
            chosen.flatten(0, 1)
            if chosen.ndim == 4
            else chosen.repeat_interleave(heads, 0)
        )
        of_queries = q.unflatten(1, (heads, -1)).flatten(0, 1)
        out = self.attend(
            of_queries, kv.flatten(0, 1), Choice(None, [of_heads]), values
        )
        return out.unflatten(0, (-1, heads)).flatten(1, 2)


class AttendsToChosen(Protocol):
    def attend(
        self, q: Tensor, latents: Tensor, choice: "Choice", values: slice
    ) -> Tensor: ...


class Choice:
    """Inputs of an index, and later the keys it chose; modules pass it on like a mask or indices."""

    def __init__(self, index: IndexInputs | None, chosen: list[Tensor]) -> None:
        self.index = index
        self.chosen = chosen
        """Choice of each ``Rows``: ``packed`` global positions (B, T, k), or (B, G, T, k) of each key head."""

    @property
    def is_of_everything(self) -> bool:
        """True if queries attend to every key they see: neither an index nor a list is needed."""
        return bool(self.chosen) and all(
            chosen.shape[-1] == 0 for chosen in self.chosen
        )

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: Any = (), kwargs: object = None
    ) -> Any:
        """Return the choice where a module combines it with a mask, by ``&`` or ``torch.cat``."""
        found = args[0] if isinstance(args[0], list | tuple) else args
        return next(each for each in found if isinstance(each, Choice))

    def to(self, *_: object) -> "Choice":
        return self

    def attend(
        self,
        module: nn.Module,
        qkv: tuple[Tensor, Tensor, Tensor],
        asked: Asked | AskedOfCache,
    ) -> Tensor:
        """Return attention (B, T, H, v) of queries (B, H, T, D), and store the keys they chose."""
        if hasattr(module, "expand_kv"):
            return attend_to_chosen(module, *qkv[:2], self, asked)
        return attend_by_key_head(qkv, self, asked)


def choice_of(further: dict[str, Any], mask: object) -> Choice | None:
    """Return the choice among the arguments that a module passes to its attention function; None if there is none."""
    given = (mask, *(further.get(name) for name in CHOICES))
    return next((each for each in given if isinstance(each, Choice)), None)


def rows_now(device: torch.device, tail: int = 0) -> list[tuple[slice, Row]]:
    """Return the current pass's slices of the batch, each with the ``Row`` its sequences have, indices on ``device``.

    Over a cache, the first rank has inputs of ``tail`` tokens before the new ones.
    """
    turn = current_turn()
    if turn is not None:
        before = range(turn.start - tail, turn.start)
        rank = turn.rank if turn.is_split else 0
        masks = [mask.spec for mask in turn.reaches[CAUSAL].masks]
        each = zip(parts_of(len(masks)), masks, strict=True)
        return [
            (part, Row(mask, turn.queries, rank, device, tail=before))
            for part, mask in each
        ]
    now = _now()
    documents: list[Any] = [None]
    if now.packed is not None:
        now.packed.is_seen, documents = True, now.packed.rows
    rank = 0 if now.group is None else dist.get_rank(now.group)
    rows: list[tuple[slice, Row]] = []
    for number, (part, lengths) in enumerate(
        zip(parts_of(len(documents)), documents, strict=True)
    ):
        layout = now.layouts[min(number, len(now.layouts) - 1)]
        rows.append(
            (
                part,
                Row(
                    CAUSAL.in_text(layout.length, lengths).spec,
                    layout,
                    rank,
                    device,
                ),
            )
        )
    return rows


def everything(hidden_states: Tensor, tokens: int) -> Choice | None:
    """Return a choice of all keys if no token of the batch (B, T, C), on any rank, sees more than ``tokens``."""
    # While an index learns it must choose even if every key is seen. A recomputation without autograd must take the
    # same path, because it reuses the attention results that the pass kept.
    if current_turn() is not None or _now().is_part or is_learning():
        return None
    rows = rows_now(hidden_states.device)
    none = torch.empty(
        *hidden_states.shape[:2], 0, dtype=torch.int32, device=hidden_states.device
    )
    return (
        None
        if any(row.most > tokens for _, row in rows)
        else Choice(None, [none[part] for part, _ in rows])
    )


def group_now() -> dist.ProcessGroup | None:
    """Return the group over which the tokens of the current pass are split."""
    turn = current_turn()
    if turn is not None:
        return turn.group if turn.is_split else None
    return _now().group


def _now() -> SequencePass:
    now = current_pass()
    assert now is not None, "a model with an index is not compiled"
    return now


def rotation_of(index: nn.Module) -> Any:
    code: Any = inspect.unwrap(forward_of(index))
    return next(
        code.__globals__[name] for name in _ROTATIONS if name in code.__code__.co_names
    )


def attend_to_chosen(
    module: nn.Module,
    query: Tensor,
    latents: Tensor,
    choice: Choice,
    asked: AttendsToChosen,
) -> Tensor:
    """Attend to latents: absorbed queries (B, H, T, n + P) give (B, T, H, v)."""

    def attend(q: Tensor) -> Tensor:
        return asked.attend(q, latents[:, 0], choice, slice(0, module.kv_lora_rank))

    out = absorbed_attention(module, query, latents, attend)
    choice.index = None
    return out.transpose(1, 2)


def attend_by_key_head(
    qkv: tuple[Tensor, Tensor, Tensor], choice: Choice, asked: Asked | AskedOfCache
) -> Tensor:
    """Attend with each key head as a separate sequence: its queries, and its own choice or the common one."""
    kv, size = torch.cat(qkv[1:], -1), qkv[1].shape[-1]
    return asked.attend_heads(qkv[0], kv, choice, slice(size, kv.shape[-1])).transpose(
        1, 2
    )
