"""Mistral Large 4: an index of hidden states."""

from typing import Any, Final

import torch
from torch import Tensor

from ringspan.torch.mechanisms.chosen_keys.choice import Choice, everything
from ringspan.torch.mechanisms.chosen_keys.modules import Index
from ringspan.torch.model.layers.cache_names import given_cache
from ringspan.torch.model.layers.family import ChosenKeys, Family


class _IndexOfHidden(Index):
    """Mistral Large 4: index queries come from hidden states, scaled by position; some layers do not rotate them."""

    @torch.no_grad()
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self: Any,
        hidden_states: Tensor,
        turns: tuple[Tensor, Tensor],
        _: object,
        position_ids: Tensor,
        **named: Any,
    ) -> Choice:
        if (all_ := everything(hidden_states, self.index_topk)) is not None:
            return all_
        q = self.wq_b(self.q_input_norm(hidden_states)).unflatten(
            -1, (self.n_heads, self.head_dim)
        )
        q = self.softmax_scaling(q, position_ids, head_dim_first=False)
        return self.ring_choice(
            q, hidden_states, turns if self.use_rope else None, given_cache(named)
        )


FAMILIES: Final = (
    Family(
        name="Mistral Large 4",
        types=("mistral_large4_text",),
        counts_distances=False,  # queries are scaled by the logarithm of their positions
        index=ChosenKeys(mixin=_IndexOfHidden),
    ),
)
