"""MiniMax-M3: each key/value head chooses blocks of keys."""

from typing import Any, Final

import torch
from torch import Tensor

from ringspan.core.geometry.layer_mask import CAUSAL
from ringspan.core.selection import Index
from ringspan.torch.engine.attention.cached import current_turn
from ringspan.torch.mechanisms.chosen_keys.cached import choose_blocks_of_cache
from ringspan.torch.mechanisms.chosen_keys.choice import (
    Choice,
    everything,
    group_now,
    rotation_of,
)
from ringspan.torch.mechanisms.chosen_keys.chosen import (
    Blocks,
    choose_blocks,
)
from ringspan.torch.mechanisms.chosen_keys.pooled import choice_of_rows
from ringspan.torch.mechanisms.chosen_keys.windows import (
    Row,
    fetched,
    visible,
)
from ringspan.torch.model.layers.family import ChosenKeys, Family
from ringspan.torch.model.layers.modules import Mixin


class BlockIndex(Mixin):
    """MiniMax-M3: each key/value head chooses blocks of keys; a block scores as its best key."""

    key_numbers = property(lambda self: self.head_dim)

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any,
        _: object,
    ) -> Choice:
        """Return the ``topk_blocks`` blocks of ``block_size`` keys that each query's key/value head attends to.

        A block scores as its best key. Queries are local, and blocks are chosen among the keys of all ranks.
        """
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
                [choose_blocks_of_cache(turn, turn.reaches[CAUSAL], q, keys, blocks)],
            )

        def chosen(part: slice, row: Row) -> Tensor:
            fetch, first, stop = visible(row)
            keys = fetched(k[part, :, 0], fetch, group_now())
            return fetch.at(choose_blocks(q[part], keys, first, stop, blocks))

        return choice_of_rows(chosen, q.device)


def _cost(module: Any, token: int) -> Index | None:
    if not isinstance(module.indexer, BlockIndex):
        return None
    of: Any = module.indexer
    heads, size = of.q_proj.out_features // of.head_dim, of.block_size
    return Index(
        topk=of.topk_blocks,
        token=token,
        size=size,
        keys=size,
        scored=heads * of.head_dim * size,
        key=of.head_dim,
        kept=heads * of.topk_blocks * size,
    )


FAMILIES: Final = (
    Family(
        name="MiniMax-M3",
        types=("minimax_m3_vl_text",),
        index=ChosenKeys(layers=("minimax_m3_sparse",), mixin=BlockIndex, cost=_cost),
        counts_distances=False,  # blocks begin at multiples of their size
    ),
)
