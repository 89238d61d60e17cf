"""DeepSeek-V4: windows of tokens pooled into entries, next to a sliding window."""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringspan.core.geometry.layer_mask import CAUSAL, LayerMask
from ringspan.core.selection import EVERYTHING, Index
from ringspan.torch.engine.attention.cached import Turn, current_turn
from ringspan.torch.engine.attention.handler import handled
from ringspan.torch.engine.attention.part import accumulation_dtype
from ringspan.torch.engine.attention.request import Request, in_autocast
from ringspan.torch.mechanisms.chosen_keys.cached import attend_to_both
from ringspan.torch.mechanisms.chosen_keys.choice import (
    Asked,
    AskedOfCache,
    Choice,
    everything,
    group_now,
    rotation_of,
    rows_now,
)
from ringspan.torch.mechanisms.chosen_keys.chosen import (
    IndexInputs,
    all_seen,
    choose,
    packed,
    unpacked,
)
from ringspan.torch.mechanisms.chosen_keys.pooled import (
    HeldEntries,
    best_entries,
    entries_of_cache,
    entries_of_row,
    of_rows,
)
from ringspan.torch.mechanisms.chosen_keys.windows import (
    Attended,
    Row,
    Windows,
    before,
    fetched,
)
from ringspan.torch.model.layers.decoder import of_layers
from ringspan.torch.model.layers.family import ChosenKeys, Family
from ringspan.torch.model.layers.modules import Mixin

_LAYERS: Final = ("compressed_sparse_attention", "heavily_compressed_attention")


def _layer_masks(config: Any) -> list[LayerMask]:
    windows = of_layers(config, "sliding_window")
    return [
        LayerMask(window=window) if kind in (*_LAYERS, "sliding_attention") else CAUSAL
        for kind, window in zip(config.layer_types, windows, strict=True)
    ]


class Compressor(Mixin):
    """DeepSeek-V4: windows of tokens are pooled into entries, all seen or chosen by an index, next to a window."""

    # A replica whose documents are all too short for an entry has no gradient for these weights.
    rests_on_replicas = True

    @property
    def key_numbers(self: Any) -> float:
        return (
            self.head_dim + getattr(getattr(self, "indexer", None), "head_dim", 0)
        ) / self.compress_rate

    def forward(
        self: Any,
        hidden_states: Tensor,
        q_residual: Tensor,
        position_ids: Tensor,
        cache: Any,
        layer_idx: int,
    ) -> tuple[Tensor, Choice]:
        """Return no pooled keys (B, 1, 0, D), and a choice that holds the entries and what each query attends to.

        transformers appends the first to the layer's keys and builds a mask from the second. Here the keys stay as they
        are, and the choice reaches the attention function in place of the mask. An entry pools ``compress_rate``
        tokens; in layers with an index it also pools the ``compress_rate`` tokens before them, and the index chooses
        entries.
        """
        index: Any = getattr(self, "indexer", None)
        size: int = self.compress_rate
        nothing = hidden_states.new_empty(len(hidden_states), 1, 0, self.head_dim)
        # Documents shorter than a window have no entries, and the weights of this module get no gradient.
        if (none := everything(hidden_states, size - 1)) is not None:
            rows = zip(rows_now(hidden_states.device), none.chosen, strict=True)
            return nothing, Entries(
                [(part, row, nothing[part, 0], chosen) for (part, row), chosen in rows]
            )
        inputs, asked = (
            [self.kv_proj(hidden_states), self.gate_proj(hidden_states)],
            None,
        )
        if index is not None:
            with torch.no_grad():
                asked = _asked(index, hidden_states, q_residual, position_ids)
                inputs += [index.kv_proj(hidden_states), index.gate_proj(hidden_states)]
        reach = size if index is None else 2 * size

        def pool(tokens: Tensor, part: slice, windows: Windows) -> Tensor:
            kv, gate, *others = tokens.split([each.shape[-1] for each in inputs], -1)
            first = position_ids[part, windows.last] - size + 1
            pooled = _pooled(self, kv, gate, windows, first)
            if index is not None:
                with torch.no_grad():
                    keys = _pooled(index, others[0], others[1], windows, first)
                pooled = torch.cat((pooled, keys), -1)
            return pooled

        x = torch.cat(inputs, -1)
        if current_turn() is not None:
            pools = cache.pools(layer_idx, size, reach)
            return nothing, CachedEntries(
                entries_of_cache(x, size, reach, pool, pools), asked
            )
        made: list[tuple[slice, Row, Tensor, Tensor]] = []
        for part, row in rows_now(hidden_states.device):
            windows, pooled = entries_of_row(x, part, row, size, reach, pool)
            entries = fetched(pooled, windows.entries, group_now(), is_wide=True)
            made.append(
                (
                    part,
                    row,
                    entries[..., : self.head_dim],
                    _chosen(asked, part, entries, windows, row.length),
                )
            )
        return nothing, Entries(made)


def _asked(
    index: Any, hidden_states: Tensor, q_residual: Tensor, positions: Tensor
) -> IndexInputs:
    turns = index.rotary_emb(
        hidden_states, position_ids=positions, layer_type=index.rope_layer_type
    )
    q = rotation_of(index)(
        index.q_b_proj(q_residual).unflatten(-1, (-1, index.head_dim)),
        *turns,
        unsqueeze_dim=2,
    )
    weights = (
        index.scorer.weights_proj(hidden_states).float() * index.scorer.weights_scaling
    )
    return IndexInputs(q, q, weights, index.scorer.softmax_scale, index.index_topk)


def _pooled(
    module: Any, kv: Tensor, gate: Tensor, windows: Windows, first: Tensor
) -> Tensor:
    """Return the entries (B, W, D) of W windows: gated means of their tokens, normalised, turned to position ``first``.

        entry = norm(sum_t softmax_t(gate_t + bias_t) * kv_t)     for each channel

    A window of two blocks overlaps its neighbour: the first half of the channels is pooled from the earlier block, the
    second half from the later one. Columns below 0 lie before the document and get no weight.
    """
    size = windows.size
    gate = gate.unflatten(2, (-1, size)) + module.position_bias
    kv, is_there = (
        kv.unflatten(2, (-1, size)),
        (windows.columns >= 0).unflatten(1, (-1, size))[..., None],
    )
    halves = [x.chunk(2, -1) if kv.shape[2] == 2 else (x,) for x in (kv, gate)]
    kv, gate = (
        torch.cat([half[:, :, number] for number, half in enumerate(each)], 2)
        for each in halves
    )
    gate = gate.masked_fill(~is_there.flatten(1, 2), -torch.inf)
    kv = kv.masked_fill(~is_there.flatten(1, 2), 0)
    entries = module.kv_norm(
        (kv * gate.softmax(2, dtype=accumulation_dtype(gate.dtype)).to(kv.dtype)).sum(2)
    )
    turns = module.rotary_emb(
        entries, position_ids=first, layer_type=module.rope_layer_type
    )
    return rotation_of(module)(entries[:, None], *turns)[:, 0]


def _chosen(
    asked: IndexInputs | None,
    part: slice,
    entries: Tensor,
    windows: Windows,
    length: int,
) -> Tensor:
    if asked is None:
        return all_seen(windows.first, windows.stop, windows.most).expand(
            len(entries), -1, -1
        )
    keys = entries[..., -asked.q.shape[-1] :].detach()
    index = of_rows(asked, part, keys, windows)
    (found,) = handled(
        lambda: (packed(choose(index, windows.first, windows.stop), length),)
    )
    return unpacked(found)


class Entries(Choice):
    """Entries of each row that this rank's queries may see, and the ones each query attends to."""

    def __init__(self, rows: list[tuple[slice, Row, Tensor, Tensor]]) -> None:
        super().__init__(None, [])
        self.rows = rows

    def attend(
        self,
        module: Any,
        qkv: tuple[Tensor, Tensor, Tensor],
        asked: Asked | AskedOfCache,
    ) -> Tensor:
        """Return attention (B, T, H, D) of each query to its sliding window and its chosen entries, in one softmax.

        The keys of a row are its window's tokens, fetched from other ranks, followed by the entries, so that the
        columns of chosen entries are shifted by the number of tokens; -1 stays -1.
        """
        q, k = in_autocast(*qkv[:2])
        outs: list[Any] = []
        for part, row, entries, chosen in self.rows:
            fetch, near = before(row, module.sliding_window)
            tokens = fetched(k[part, 0], fetch, group_now(), is_wide=True)
            keys = torch.cat((tokens, entries), 1)
            far = torch.where(chosen < 0, -1, chosen + tokens.shape[1])
            columns = torch.cat((near.expand(len(far), -1, -1), far), -1).to(
                torch.int32
            )
            outs.append(
                Attended.apply(q[part], keys, columns, asked.scale, asked.sinks)
            )
        return torch.cat(outs).transpose(1, 2)


class CachedEntries(Choice):
    """Entries of each row over a cache, with the index that chooses among them, if the layer has one."""

    def __init__(self, held: list[HeldEntries], index: IndexInputs | None) -> None:
        super().__init__(index, [])
        self.held = held

    def attend(
        self,
        module: Any,
        qkv: tuple[Tensor, Tensor, Tensor],
        asked: Asked | AskedOfCache,
    ) -> Tensor:
        """Return attention (B, T, H, D) of new tokens to their sliding window and their chosen entries in the cache.

        Every rank holds some tokens and some entries; the results of all ranks are combined in one softmax.
        """
        assert isinstance(asked, AskedOfCache), "there is a cache"
        size, entries, columns = qkv[0].shape[-1], [], []
        for each in self.held:
            windows = each.windows
            if self.index is None:
                found = all_seen(windows.first, windows.stop, windows.most).expand(
                    len(each.entries), -1, -1
                )
            else:
                keys = each.entries[..., -self.index.q.shape[-1] :]
                found = best_entries(self.index, each._replace(entries=keys))
            # A rank may hold no entry: one row and one column of padding keep both from being empty.
            entries.append(pad(each.entries[..., :size], (0, 0, 0, 1)))
            columns.append(pad(_of_rank(found, each, asked.turn), (0, 1), value=-1))
        q, k, v = in_autocast(*qkv)
        near = Request(q=q, k=k.to(q.dtype), v=v.to(q.dtype), scale=asked.scale)
        kind = LayerMask(window=module.sliding_window)
        entries = [each.to(q.dtype) for each in entries]
        return attend_to_both(
            asked.turn, near, kind, entries, columns, asked.sinks
        ).transpose(1, 2)


def _of_rank(numbers: Tensor, held: HeldEntries, turn: Turn) -> Tensor:
    """Return this rank's columns of entries from their numbers (b, T, k), padded with -1 to the longest query's."""
    if held.numbers is None:
        return numbers
    is_here = (numbers >= 0) & (numbers % turn.new.ranks == turn.rank)
    columns = torch.where(is_here, numbers // turn.new.ranks, -1)
    return columns.topk(int(is_here.sum(-1).max()), -1).values


def _cost(module: Any, token: int) -> Index | None:
    """Count entries next to a window and, if the layer has one, their index, whose keys are sent with them."""
    of = getattr(module, "compressor", None)
    if of is None:
        return None
    size, index = of.compress_rate, getattr(of, "indexer", None)
    parts = [part for part in (of, index) if part is not None]
    numbers = sum(
        part.kv_proj.out_features + part.gate_proj.out_features for part in parts
    )
    reach = size if index is None else 2 * size
    everything = Index(
        topk=EVERYTHING,
        token=of.key_numbers,
        size=size,
        window=module.sliding_window,
        tail=(reach - 1, numbers),
    )
    if index is None:
        return everything
    topk, scored = index.index_topk, index.num_heads * index.head_dim
    return replace(everything, topk=topk, scored=scored, kept=topk)


FAMILIES: Final = (
    Family(
        name="DeepSeek-V4",
        types=("deepseek_v4",),
        layer_masks=_layer_masks,
        index=ChosenKeys(layers=_LAYERS, mixin=Compressor, pools=True, cost=_cost),
    ),
)
