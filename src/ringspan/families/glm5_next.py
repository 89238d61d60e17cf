"""GLM-5-Next: keys of the index are means of a pool, weighted by a gate of each channel."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from ringspan.core.selection import Index
from ringspan.torch.engine.attention.part import accumulation_dtype
from ringspan.torch.mechanisms.chosen_keys.choice import (
    Choice,
    everything,
)
from ringspan.torch.mechanisms.chosen_keys.chosen import IndexInputs
from ringspan.torch.mechanisms.chosen_keys.pooled import (
    choose_pools,
    cost_of_pools,
)
from ringspan.torch.model.layers.cache_names import given_cache
from ringspan.torch.model.layers.family import ChosenKeys, Family
from ringspan.torch.model.layers.modules import Mixin


class GatedPools(Mixin):
    """GLM-5-Next: keys are means of a pool, weighted by a gate of each channel."""

    key_numbers = property(lambda self: self.head_dim / self.index_kpool)

    @torch.no_grad()
    def forward(
        self: Any, hidden_states: Tensor, q_resid: Tensor, **named: Any
    ) -> Choice:
        """Return the choice of each query (B, T): its best ``index_topk // index_kpool`` pools, and the tail.

        A pool's key is a mean of its ``index_kpool`` keys, weighted for each channel by softmax(gate + bias) over the
        pool. The tail are the tokens after the last complete pool, which a query always attends to.
        """
        # Queries also attend to the tail, at most one token less than a pool.
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
        return choose_pools(index, size, pool, pools)


def _cost(module: Any, token: int) -> Index | None:
    if not isinstance(module.indexer, GatedPools):
        return None
    of: Any = module.indexer
    return cost_of_pools(
        of,
        token,
        heads=of.n_heads,
        size=of.index_kpool,
        topk=of.index_topk // of.index_kpool,
        inputs=2 * of.head_dim,
    )


FAMILIES: Final = (
    Family(
        name="GLM-5-Next",
        types=("glm5_next_text",),
        index=ChosenKeys(mixin=GatedPools, pools=True, cost=_cost),
    ),
)
