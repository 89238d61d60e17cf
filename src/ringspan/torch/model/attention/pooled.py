"""Indexes of blocks and of pooled keys (MiniMax-M3, Qwen4-exp, GLM-5-Next), and DeepSeek-V4's compressed keys.

Blocks and pools begin with their document, also in packed and padded rows. Each module computes what its tokens give;
pools that reach over the border of a span are made by the rank of their last token, of tokens that it fetches.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from ringspan.torch.attention.cached import Turn, current_turn
from ringspan.torch.attention.handler import handled
from ringspan.torch.attention.index.cached import (
    attend_to_both,
    best_of_shares,
    choose_blocks_of_cache,
)
from ringspan.torch.attention.index.chosen import (
    Blocks,
    IndexInputs,
    all_seen,
    choose,
    choose_blocks,
    packed,
    unpacked,
)
from ringspan.torch.attention.index.windows import (
    Attended,
    Row,
    Windows,
    at_columns,
    before,
    fetched,
    visible,
    windows_of,
)
from ringspan.torch.attention.part import accumulation_dtype
from ringspan.torch.attention.request import Request, in_autocast
from ringspan.torch.layers.cache_names import given_cache
from ringspan.torch.layers.decoder import LayerKind
from ringspan.torch.layers.modules import Mixin
from ringspan.torch.model.attention.choice import (
    Asked,
    AskedOfCache,
    Choice,
    everything,
    group_now,
    rotation_of,
    rows_now,
)


class BlockIndex(Mixin):
    """MiniMax-M3: each key/value head chooses blocks of keys, which score as the best of them."""

    key_numbers = property(lambda self: self.head_dim)

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any,
        _: object,
    ) -> Choice:
        if (
            all_ := everything(hidden_states, self.topk_blocks * self.block_size)
        ) is not None:
            return all_
        q = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
        k = self.k_norm(self.k_proj(hidden_states)[:, :, None])
        turns = (x[..., : self.head_dim] for x in position_embeddings)
        q, k = rotation_of(self)(q, k, *turns, unsqueeze_dim=2)
        blocks, turn = (
            Blocks(self.block_size, self.topk_blocks, self.local_blocks),
            current_turn(),
        )
        if turn is not None:
            keys = cache.layers[self.layer_idx].update_indexer(k[:, :, 0])
            return Choice(
                None,
                [
                    choose_blocks_of_cache(
                        turn, turn.reaches[LayerKind()], q, keys, blocks
                    )
                ],
            )

        def chosen(part: slice, row: Row) -> Tensor:
            fetch, first, stop = visible(row)
            keys = fetched(k[part, :, 0], fetch, group_now())
            return fetch.at(choose_blocks(q[part], keys, first, stop, blocks))

        return _choice(chosen, q.device)


class PooledIndex(Mixin):
    """Qwen4-exp: keys are means of four, turned as the first of them."""

    key_numbers = property(lambda self: self.index_head_dim / self.compress_ratio)

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        _: object,
        cache: Any,
    ) -> Choice:
        # The tail, of a token less than a pool, is attended to as well.
        if (
            all_ := everything(
                hidden_states, (self.block_topk + 1) * self.compress_ratio - 1
            )
        ) is not None:
            return all_
        size, turn = self.index_head_dim, rotation_of(self)
        heads = self.index_qk_proj(hidden_states).unflatten(-1, (-1, size))
        cos, sin = position_embeddings
        q = turn(
            self.q_layernorm(heads[:, :, : self.index_n_heads]),
            cos=cos,
            sin=sin,
            unsqueeze_dim=2,
        )
        turns = [x.expand(len(q), -1, -1) for x in position_embeddings]

        def pool(tokens: Tensor, *_: object) -> Tensor:
            keys, cos, sin = tokens.split([size, *(x.shape[-1] for x in turns)], -1)
            keys = self.k_layernorm(
                keys.to(accumulation_dtype(keys.dtype)).mean(2).to(keys.dtype)
            )
            return turn(
                keys[:, :, None], cos=cos[:, :, 0], sin=sin[:, :, 0], unsqueeze_dim=2
            )[:, :, 0]

        inputs = torch.cat((heads[:, :, self.index_n_heads], *turns), -1)
        index = IndexInputs(
            q, inputs, torch.ones_like(q[..., 0]), size**-0.5, self.block_topk
        )
        pools = (
            None
            if cache is None
            else cache.pools(self.layer_idx, self.compress_ratio, self.compress_ratio)
        )
        return _choose_pools(index, self.compress_ratio, pool, pools)


class GatedPools(Mixin):
    """GLM-5-Next: keys are means of a pool, weighted by a gate of each channel."""

    key_numbers = property(lambda self: self.head_dim / self.index_kpool)

    @torch.no_grad()
    def forward(
        self: Any, hidden_states: Tensor, q_resid: Tensor, **named: Any
    ) -> Choice:
        # With the tail, which is attended to as well.
        if (
            all_ := everything(hidden_states, self.index_topk + self.index_kpool - 1)
        ) is not None:
            return all_
        q = self.wq_b(q_resid).unflatten(-1, (-1, self.head_dim))
        weights = (
            self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
            * self.n_heads**-0.5
        )
        gate = linear(hidden_states, self.index_kpool_compress_gate)
        inputs = torch.cat((self.k_norm(self.wk(hidden_states)), gate), -1)

        def pool(tokens: Tensor, *_: object) -> Tensor:
            keys, gates = tokens.chunk(2, -1)
            shares = (gates + self.index_kpool_compress_ape).softmax(
                2, dtype=accumulation_dtype(gates.dtype)
            )
            return (shares.to(keys.dtype) * keys).sum(2)

        index = IndexInputs(
            q, inputs, weights, self.softmax_scale, self.index_topk // self.index_kpool
        )
        size, cache = self.index_kpool, given_cache(named)
        pools = None if cache is None else cache.pools(self.layer_idx, size, size)
        return _choose_pools(index, size, pool, pools)


def _choice(chosen: Callable[[slice, Row], Tensor], device: torch.device) -> Choice:

    def of_row(part: slice, row: Row) -> tuple[Tensor]:
        return (packed(chosen(part, row), row.length),)

    return Choice(
        None, [handled(partial(of_row, *each))[0] for each in rows_now(device)]
    )


# Entries (b, k, E) of windows' tokens (b, k, reach, C) of some rows.
_Pool = Callable[[Tensor, slice, Windows], Tensor]


def _entries(
    x: Tensor, part: slice, row: Row, size: int, reach: int, pool: _Pool
) -> tuple[Windows, Tensor]:
    """Return a row's windows of inputs (B, T, C), and the entries that are made here."""
    windows = windows_of(row, size, reach)
    tokens = fetched(x[part], windows.inputs, group_now())
    return windows, pool(at_columns(tokens, windows.columns), part, windows)


class HeldEntries(NamedTuple):
    """Entries of a row over a cache: all of them, or this rank's, of these numbers."""

    part: slice
    windows: Windows
    entries: Tensor
    numbers: Tensor | None


def entries_of_cache(
    x: Tensor, size: int, reach: int, pool: _Pool, pools: Any
) -> list[HeldEntries]:
    """Add entries that end with new tokens (B, T, C) to a cache; return each row's."""
    turn = current_turn()
    assert turn is not None, "there is a cache"
    rows, first = rows_now(x.device, pools.count), turn.start // size
    inputs, count = pools.join(x, turn), -(-turn.new.length // size) - first
    all_windows, new, is_new = [], [], []
    for part, row in rows:
        windows, made = _entries(inputs, part, row, size, reach, pool)
        new.append(
            made.new_zeros(len(made), count, made.shape[-1]).index_copy_(
                1, windows.numbers - first, made
            )
        )
        is_new.append(
            (windows.entries.positions[first] >= turn.start).expand(len(made))
        )
        all_windows.append(windows)
    entries = pools.add(torch.cat(new), torch.cat(is_new), turn)
    is_all = turn.is_split or turn.new.ranks == 1
    numbers = None if is_all else pools.numbers(x.device)
    return [
        HeldEntries(part, windows, entries[part], numbers)
        for (part, _), windows in zip(rows, all_windows, strict=True)
    ]


def best_entries(index: IndexInputs, held: HeldEntries) -> Tensor:
    """Return the numbers (b, T, k) of the entries that a row's queries choose, -1 for none."""
    windows = held.windows
    of_row = _of_rows(index, held.part, held.entries, windows)
    if held.numbers is None or of_row.topk == windows.most:  # all of them
        return choose(of_row, windows.first, windows.stop)
    sees = (held.numbers >= windows.first[:, None]) & (
        held.numbers < windows.stop[:, None]
    )
    turn = current_turn()
    assert turn is not None, "there is a cache"
    return best_of_shares(of_row, held.numbers, sees[None], turn.group)


def _choose_pools(index: IndexInputs, size: int, pool: _Pool, pools: Any) -> Choice:
    if pools is not None:
        held = entries_of_cache(index.k, size, size, pool, pools)
        found = [each.windows.tokens(best_entries(index, each)) for each in held]
        most = max(each.shape[-1] for each in found)
        return Choice(
            None,
            [
                torch.cat(
                    [pad(each, (0, most - each.shape[-1]), value=-1) for each in found]
                )
            ],
        )

    def chosen(part: slice, row: Row) -> Tensor:
        windows, made = _entries(index.k, part, row, size, size, pool)
        keys = fetched(made, windows.entries, group_now())
        found = choose(
            _of_rows(index, part, keys, windows), windows.first, windows.stop
        )
        return windows.tokens(found)

    return _choice(chosen, index.q.device)


def _of_rows(
    index: IndexInputs, part: slice, keys: Tensor, windows: Windows
) -> IndexInputs:
    return index.of_rows(part)._replace(k=keys, topk=min(index.topk, windows.most))


class Compressor(Mixin):
    """DeepSeek-V4: windows of tokens pooled into entries, which queries see, or choose, next to a sliding window."""

    rests_on_replicas = True  # where all documents of one are too short for an entry

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
        index: Any = getattr(self, "indexer", None)
        size: int = self.compress_rate
        nothing = hidden_states.new_empty(len(hidden_states), 1, 0, self.head_dim)
        if (
            none := everything(hidden_states, size - 1)
        ) is not None:  # no entries, so that no weight has a gradient
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
            windows, pooled = _entries(x, part, row, size, reach, pool)
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
    index = _of_rows(asked, part, keys, windows)
    (found,) = handled(
        lambda: (packed(choose(index, windows.first, windows.stop), length),)
    )
    return unpacked(found)


class Entries(Choice):
    """Entries of each row that are seen here, and which of them each query attends to."""

    def __init__(self, rows: list[tuple[slice, Row, Tensor, Tensor]]) -> None:
        super().__init__(None, [])
        self.rows = rows

    def attend(
        self,
        module: Any,
        qkv: tuple[Tensor, Tensor, Tensor],
        asked: Asked | AskedOfCache,
    ) -> Tensor:
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
    """Entries of each row over a cache, and what chooses among them, if anything does."""

    def __init__(self, held: list[HeldEntries], index: IndexInputs | None) -> None:
        super().__init__(index, [])
        self.held = held

    def attend(
        self,
        module: Any,
        qkv: tuple[Tensor, Tensor, Tensor],
        asked: Asked | AskedOfCache,
    ) -> Tensor:
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
            # at least one, as the columns
            entries.append(pad(each.entries[..., :size], (0, 0, 0, 1)))
            columns.append(pad(_of_rank(found, each, asked.turn), (0, 1), value=-1))
        q, k, v = in_autocast(*qkv)
        near = Request(q=q, k=k.to(q.dtype), v=v.to(q.dtype), scale=asked.scale)
        kind = LayerKind(window=module.sliding_window)
        entries = [each.to(q.dtype) for each in entries]
        return attend_to_both(
            asked.turn, near, kind, entries, columns, asked.sinks
        ).transpose(1, 2)


def _of_rank(numbers: Tensor, held: HeldEntries, turn: Turn) -> Tensor:
    """Return the columns of entries here, by their numbers (b, T, k), -1 for none; as few as there are."""
    if held.numbers is None:
        return numbers
    is_here = (numbers >= 0) & (numbers % turn.new.ranks == turn.rank)
    columns = torch.where(is_here, numbers // turn.new.ranks, -1)
    return columns.topk(int(is_here.sum(-1).max()), -1).values


class NGrams(Mixin):
    """Qwen4-exp's embeddings of the last N tokens of a document."""

    def forward(self: Any, input_ids: Tensor, cache: Any) -> Tensor:
        outs: list[Tensor] = []
        for tokens, columns in _before(
            input_ids[..., None], self.ngram_size, cache, self.layer_idx, "n-grams"
        ):
            grams = at_columns(tokens, columns)[..., 0].masked_fill(
                columns < 0, self.eos_token_id
            )
            out = super().forward(grams.flatten(0, 1), None)  # pyright: ignore[reportAttributeAccessIssue]
            outs.append(out[:, -1].unflatten(0, grams.shape[:2]))
        return torch.cat(outs)


class DilatedConvolution(Mixin):
    """Qwen4-exp's convolution of each channel over every third token, say, of a document."""

    def _short_conv(self: Any, hidden_states: Tensor, cache: Any) -> Tensor:
        taps, step = self.conv1d.weight[:, 0].T, self.conv1d.dilation[0]
        reach = (len(taps) - 1) * step + 1
        outs: list[Tensor] = []
        for tokens, columns in _before(
            hidden_states, reach, cache, self.layer_idx, "convolution"
        ):
            parts = (
                at_columns(tokens, columns[:, step * tap]) * weight
                for tap, weight in enumerate(taps)
            )
            outs.append(
                sum(parts, torch.zeros((), dtype=tokens.dtype, device=tokens.device))
            )
        return silu(torch.cat(outs))


def _before(
    x: Tensor, reach: int, cache: Any, layer: int, name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each row's tokens (b, n, C) and the columns (T, reach) of those up to each of x (B, T, C), or -1."""
    tail, turn = (
        None if cache is None else cache.tail(layer, name, reach),
        current_turn(),
    )
    rows = rows_now(x.device, 0 if tail is None else tail.count)
    x = x if tail is None else tail.join(x, turn)
    for part, row in rows:
        fetch, columns = before(row, reach)
        yield fetched(x[part], fetch, group_now()), columns
