"""BLOOM and Falcon: attention in their own code, with ALiBi or rotary positions."""

import inspect
import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from ringspan.torch.model.attention.own import InlineAttention
from ringspan.torch.model.layers.family import Family
from ringspan.torch.model.layers.modules import forward_of


def doubling_slopes(heads: int, like: Tensor) -> Tensor:
    """Return BLOOM's ALiBi slopes (H,): powers of ``2^(-8/P)``, P = 2^floor(log2 H), then odd ones of ``2^(-4/P)``."""
    whole = 2 ** math.floor(math.log2(heads))
    powers = [2 ** (-8 / whole * (i + 1)) for i in range(whole)]
    powers += [2 ** (-4 / whole * (2 * i + 1)) for i in range(heads - whole)]
    return torch.tensor(powers, dtype=torch.float32, device=like.device)


class _Bloom(InlineAttention):
    """BLOOM: ALiBi, with the residual inside."""

    ring_needs = ("_reshape", "query_key_value", "dense", "inv_norm_factor")

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        hidden = given["hidden_states"]
        q, k, v = self._reshape(self.query_key_value(hidden))
        slopes = doubling_slopes(self.num_heads, hidden)
        out = self.attend(
            q, k, v, self.inv_norm_factor, self.attention_dropout.p, alibi_slopes=slopes
        ).flatten(2)
        out = functional.dropout(self.dense(out), self.hidden_dropout, self.training)
        return given["residual"] + out, None


class _Falcon(InlineAttention):
    """Falcon: shared key/value heads, with rotary positions or ALiBi."""

    ring_needs = ("_split_heads", "query_key_value", "dense", "inv_norm_factor")

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        """Return the attention output (B, T, C) and no weights, as ``FalconAttention.forward`` does.

        With ALiBi the scores are ``(q k + slope * position) * scale``, so the slopes are scaled too. Only that branch
        has dropout, and only the rotary branch extends a cache.
        """
        hidden = given["hidden_states"]
        made = self._split_heads(self.query_key_value(hidden))
        q, k, v = (x.transpose(1, 2) for x in made)
        # ``_split_heads`` repeats each key/value head for the query heads that share it; the ring needs one copy.
        if self.new_decoder_architecture:
            groups = self.num_heads // self.num_kv_heads
            k, v = k[:, ::groups], v[:, ::groups]
        options: dict[str, Any] = {}
        dropout = 0.0
        if given.get("alibi") is None:
            rotate = inspect.unwrap(forward_of(self)).__globals__[
                "apply_rotary_pos_emb"
            ]
            q, k = rotate(q, k, *given["position_embeddings"])
            k, v = self.updated(given, k, v)
        else:
            options["alibi_slopes"] = (
                doubling_slopes(self.num_heads, hidden) * self.inv_norm_factor
            )
            dropout = self.attention_dropout.p
        return self.dense(
            self.attend(q, k, v, self.inv_norm_factor, dropout, **options).flatten(2)
        ), None


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return config.num_kv_heads or config.num_attention_heads
    return 1 if config.multi_query else config.num_attention_heads


FAMILIES: Final = (
    Family(
        name="BLOOM",
        types=("bloom",),
        attention={"BloomAttention": _Bloom},
        has_alibi=lambda _: True,
    ),
    Family(
        name="Falcon",
        types=("falcon",),
        attention={"FalconAttention": _Falcon},
        has_alibi=lambda config: config.alibi,
        kv_heads=_falcon_kv_heads,
    ),
)
