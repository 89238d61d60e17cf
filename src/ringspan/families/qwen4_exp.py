"""Qwen4-exp: an index of pooled keys, embeddings of n-grams, and a dilated convolution."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import silu

from ringspan.core.selection import Index
from ringspan.torch.engine.attention.part import accumulation_dtype
from ringspan.torch.mechanisms.chosen_keys.choice import (
    Choice,
    everything,
    rotation_of,
)
from ringspan.torch.mechanisms.chosen_keys.chosen import IndexInputs
from ringspan.torch.mechanisms.chosen_keys.pooled import (
    choose_pools,
    cost_of_pools,
    tokens_before,
)
from ringspan.torch.mechanisms.chosen_keys.windows import at_columns
from ringspan.torch.model.layers.family import ChosenKeys, Family
from ringspan.torch.model.layers.modules import Mixin


class PooledIndex(Mixin):
    """Qwen4-exp: an index key is the mean of four, rotated by the first one's position."""

    key_numbers = property(lambda self: self.index_head_dim / self.compress_ratio)

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        _: object,
        cache: Any,
    ) -> Choice:
        """Return the choice of each query (B, T): the best ``block_topk`` pools of its keys, and the tail.

        A pool has ``compress_ratio`` keys; its own key is their mean, normalised and rotated by the position of its
        first token.
        """
        # Queries also attend to the tail, at most one token less than a pool.
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
        return choose_pools(index, self.compress_ratio, pool, pools)


def _cost(module: Any, token: int) -> Index | None:
    if not isinstance(module.indexer, PooledIndex):
        return None
    of: Any = module.indexer
    return cost_of_pools(
        of,
        token,
        heads=of.index_n_heads,
        size=of.compress_ratio,
        topk=of.block_topk,
        inputs=3 * of.index_head_dim,
    )


class NGrams(Mixin):
    """Qwen4-exp's embeddings of the last N tokens of a document."""

    def forward(self: Any, input_ids: Tensor, cache: Any) -> Tensor:
        outs: list[Tensor] = []
        for tokens, columns in tokens_before(
            input_ids[..., None], self.ngram_size, cache, self.layer_idx, "n-grams"
        ):
            grams = at_columns(tokens, columns)[..., 0].masked_fill(
                columns < 0, self.eos_token_id
            )
            out = super().forward(grams.flatten(0, 1), None)  # pyright: ignore[reportAttributeAccessIssue]
            outs.append(out[:, -1].unflatten(0, grams.shape[:2]))
        return torch.cat(outs)


class DilatedConvolution(Mixin):
    """Qwen4-exp's convolution of each channel over every ``dilation``-th token of a document."""

    def _short_conv(self: Any, hidden_states: Tensor, cache: Any) -> Tensor:
        """Return SiLU of a causal depthwise convolution (B, T, C) within each document.

        y_t = silu(sum_i w_i x_(t - (K - 1 - i) * dilation))     K taps, x is 0 before the document
        """
        taps, step = self.conv1d.weight[:, 0].T, self.conv1d.dilation[0]
        reach = (len(taps) - 1) * step + 1
        outs: list[Tensor] = []
        for tokens, columns in tokens_before(
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


FAMILIES: Final = (
    Family(
        name="Qwen4-exp",
        types=("qwen4_exp_text",),
        index=ChosenKeys(
            mixin=PooledIndex,
            parts={"ngram_embedding": NGrams, "_short_conv": DilatedConvolution},
            pools=True,
            cost=_cost,
        ),
    ),
)
