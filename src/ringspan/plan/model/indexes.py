"""Indexes that choose a layer's keys, from the choices that their modules hand to attention, or from the modules."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from torch import nn

from ringspan.core.selection import EVERYTHING, Index
from ringspan.torch.model.attention.choice import Choice
from ringspan.torch.model.attention.pooled import (
    BlockIndex,
    Entries,
    GatedPools,
    PooledIndex,
)


def index_of(module: Any, choice: Choice, token: int) -> Index:
    """Return the index of an attention module, which fetches ``token`` numbers of each token."""
    made = getattr(module, "indexer", None)
    if choice.index is not None:
        topk, (heads, size) = choice.index.topk, choice.index.q.shape[-2:]
        return Index(
            topk=topk,
            token=token,
            scored=heads * size,
            key=choice.index.k.shape[-1],
            kept=topk,
        )
    for kind, facts in _POOLED.items() if isinstance(made, nn.Module) else ():
        if isinstance(made, kind):
            return facts(made, token)
    if isinstance(choice, Entries):
        return _entries(module.compressor, module.sliding_window)
    return Index(
        topk=choice.chosen[0].shape[2 if choice.chosen[0].ndim < 5 else 3], token=token
    )


def _blocks(of: Any, token: int) -> Index:
    heads, size = of.q_proj.out_features // of.head_dim, of.block_size
    kept = heads * of.topk_blocks * size
    scored = heads * of.head_dim * size  # for each token of a block
    return Index(
        topk=of.topk_blocks,
        token=token,
        size=size,
        keys=size,
        scored=scored,
        key=of.head_dim,
        kept=kept,
    )


def _pools(of: Any, token: int, heads: int, size: int, topk: int, inputs: int) -> Index:
    """Return an index of pools of ``size`` tokens; a query also attends to the tokens after its last pool."""
    options = {
        "size": size,
        "keys": size,
        "others": (size - 1) / 2,
        "kept": topk * size + size - 1,
    }
    scored = round(heads * size * of.key_numbers)
    return Index(
        topk=topk,
        token=token,
        scored=scored,
        key=of.key_numbers,
        tail=(size - 1, inputs),
        **options,
    )


def _entries(of: Any, window: int) -> Index:
    """Return the index of entries next to a window, if there is one; its keys travel with theirs."""
    size, index = of.compress_rate, getattr(of, "indexer", None)
    parts = [part for part in (of, index) if part is not None]
    numbers = sum(
        part.kv_proj.out_features + part.gate_proj.out_features for part in parts
    )
    reach = size if index is None else 2 * size
    all_ = Index(
        topk=EVERYTHING,
        token=of.key_numbers,
        size=size,
        window=window,
        tail=(reach - 1, numbers),
    )
    if index is None:
        return all_
    topk = index.index_topk
    return replace(all_, topk=topk, scored=index.num_heads * index.head_dim, kept=topk)


# Facts of an index by the module that replaces transformers' index.
_POOLED: Final[dict[type, Callable[[Any, int], Index]]] = {
    BlockIndex: _blocks,
    PooledIndex: lambda of, token: _pools(
        of,
        token,
        of.index_n_heads,
        of.compress_ratio,
        of.block_topk,
        3 * of.index_head_dim,
    ),
    GatedPools: lambda of, token: _pools(
        of,
        token,
        of.n_heads,
        of.index_kpool,
        of.index_topk // of.index_kpool,
        2 * of.head_dim,
    ),
}
