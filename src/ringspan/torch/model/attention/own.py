"""Attention inlined in older models' code, given to transformers' interface by a mixin per group of modules."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from ringspan.core.errors import UnsupportedError
from ringspan.torch.layers.cache_names import given_cache
from ringspan.torch.layers.modules import Mixin, forward_of, mix_in
from ringspan.torch.layers.view import ModelView


class OwnAttention(Mixin):
    ring_implementation: str

    def attend(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        dropout: float,
        **options: object,
    ) -> Tensor:
        """Map (B, H, T, D) each to (B, T, H, D)."""
        function = AttentionInterface()[self.ring_implementation]
        k, v = k.to(q.dtype), v.to(q.dtype)
        return function(
            self,
            q,
            k,
            v,
            None,
            scaling=scaling,
            dropout=dropout if self.training else 0.0,
            **options,
        )[0]


class _Method(OwnAttention):
    """GPT-J, CodeGen, GPT-Neo, GPT-NeoX Japanese: a separate method has products and softmax."""

    def _attn(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
    ) -> tuple[Tensor, None]:
        divisor = getattr(self, "scale_attn", None) or getattr(self, "norm_factor", 1.0)
        dropout = getattr(self, "attn_dropout", None) or self.attention_dropout
        options: dict[str, Any] = {}
        if getattr(self, "attention_type", None) is not None:
            options["sliding_window"] = (
                self.config.window_size if self.attention_type == "local" else None
            )
        query, key = query.to(value.dtype), key.to(value.dtype)
        return self.attend(
            query, key, value, 1 / divisor, dropout.p, **options
        ).transpose(1, 2), None


class _TransposedKeys(OwnAttention):
    """GPT-1: keys come as (B, H, D, T)."""

    def _attn(self: Any, q: Tensor, k: Tensor, v: Tensor, *_: object) -> list[Tensor]:
        scaling = v.shape[-1] ** -0.5 if self.scale else 1.0
        return [
            self.attend(
                q, k.transpose(2, 3), v, scaling, self.attn_dropout.p
            ).transpose(1, 2)
        ]


class _Inline(OwnAttention):
    def forward(self: Any, *args: object, **kwargs: object) -> object:
        given = dict(
            inspect.signature(forward_of(self)).bind(self, *args, **kwargs).arguments
        )
        given |= given.pop("kwargs", {})
        for other in ("encoder_hidden_states", "key_value_states", "attn_prompt"):
            if given.get(other) is not None:
                raise UnsupportedError(
                    f"{type(self).__name__} is given {other}, unsupported on a ring; leave it out"
                )
        return self.computed(given)

    def projected(
        self: Any, given: dict[str, Any], layers: Sequence[nn.Module], head_dim: int
    ) -> list[Tensor]:
        """Return queries, keys and values (B, H, T, D) of three layers, with cached ones."""
        hidden = given["hidden_states"]
        shape = *hidden.shape[:-1], -1, head_dim
        q, k, v = (layer(hidden).view(shape).transpose(1, 2) for layer in layers)
        return [q, *self.updated(given, k, v)]

    def updated(
        self: Any, given: dict[str, Any], k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        cache = (
            given.get("layer_past") if (named := given_cache(given)) is None else named
        )
        return (k, v) if cache is None else cache.update(k, v, self.layer_idx)


class _Bert(_Inline):
    """Megatron-BERT and RemBERT."""

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        q, k, v = self.projected(
            given, (self.query, self.key, self.value), self.attention_head_size
        )
        return self.attend(
            q, k, v, self.attention_head_size**-0.5, self.dropout.p
        ).flatten(2), None


class _Bart(_Inline):
    """MVP, TrOCR and XGLM."""

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        q, k, v = self.projected(
            given, (self.q_proj, self.k_proj, self.v_proj), self.head_dim
        )
        return self.out_proj(
            self.attend(q, k, v, self.scaling, self.dropout).flatten(2)
        ), None


class _Bloom(_Inline):
    """BLOOM: ALiBi, with the residual inside."""

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        hidden = given["hidden_states"]
        q, k, v = self._reshape(self.query_key_value(hidden))
        slopes = _doubling_slopes(self, hidden)
        out = self.attend(
            q, k, v, self.inv_norm_factor, self.attention_dropout.p, alibi_slopes=slopes
        ).flatten(2)
        out = functional.dropout(self.dense(out), self.hidden_dropout, self.training)
        return given["residual"] + out, None


class _Falcon(_Inline):
    """Falcon: shared key/value heads, with rotary positions or ALiBi."""

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        hidden = given["hidden_states"]
        made = self._split_heads(self.query_key_value(hidden))
        q, k, v = (x.transpose(1, 2) for x in made)
        if self.new_decoder_architecture:  # repeated for each query head
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
                _doubling_slopes(self, hidden) * self.inv_norm_factor
            )
            dropout = self.attention_dropout.p
        return self.dense(
            self.attend(q, k, v, self.inv_norm_factor, dropout, **options).flatten(2)
        ), None


class _Mpt(_Inline):
    """MPT: ALiBi, with interleaved slopes unless heads are a power of two."""

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        hidden = given["hidden_states"]
        made = self.Wqkv(hidden)
        if self.clip_qkv:
            made = made.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        shape = *hidden.shape[:2], self.n_heads, self.head_dim
        q, k, v = (x.reshape(shape).transpose(1, 2) for x in made.chunk(3, dim=2))
        # The layers' bias is ``-slope d`` at the distance d: its last column but one has the slopes.
        slopes = -given["position_bias"][:, 0, -2].float()
        out = self.attend(
            q, k, v, self.softmax_scale, self.attn_dropout_p, alibi_slopes=slopes
        )
        return self.out_proj(out.flatten(2)), None


def _doubling_slopes(module: Any, hidden: Tensor) -> Tensor:
    """Return BLOOM's ALiBi slopes (H,): powers of ``2^(-8/P)``, P = 2^floor(log2 H), then odd ones of ``2^(-4/P)``."""
    whole = 2 ** math.floor(math.log2(module.num_heads))
    powers = [2 ** (-8 / whole * (i + 1)) for i in range(whole)]
    powers += [2 ** (-4 / whole * (2 * i + 1)) for i in range(module.num_heads - whole)]
    return torch.tensor(powers, dtype=torch.float32, device=hidden.device)


def _has(*names: str) -> Callable[[nn.Module], bool]:
    return lambda module: all(hasattr(module, name) for name in names)


# What a module is called in transformers, what it must have to be taken for one, and who computes its attention.
_KNOWN: Final[dict[str, tuple[Callable[[nn.Module], bool], type[OwnAttention]]]] = {
    "GPTJAttention": (_has("_attn", "scale_attn", "attn_dropout"), _Method),
    "CodeGenAttention": (_has("_attn", "scale_attn", "attn_dropout"), _Method),
    "GPTNeoSelfAttention": (_has("_attn", "attention_type", "attn_dropout"), _Method),
    "GPTNeoXJapaneseAttention": (
        _has("_attn", "norm_factor", "attention_dropout"),
        _Method,
    ),
    "Attention": (_has("_attn", "c_attn", "scale", "split_heads"), _TransposedKeys),
    "MegatronBertSelfAttention": (
        _has("query", "key", "value", "attention_head_size", "dropout"),
        _Bert,
    ),
    "RemBertSelfAttention": (
        _has("query", "key", "value", "attention_head_size", "dropout"),
        _Bert,
    ),
    "MvpAttention": (_has("q_proj", "k_proj", "v_proj", "out_proj", "scaling"), _Bart),
    "TrOCRAttention": (
        _has("q_proj", "k_proj", "v_proj", "out_proj", "scaling"),
        _Bart,
    ),
    "XGLMAttention": (_has("q_proj", "k_proj", "v_proj", "out_proj", "scaling"), _Bart),
    "BloomAttention": (
        _has("_reshape", "query_key_value", "dense", "inv_norm_factor"),
        _Bloom,
    ),
    "FalconAttention": (
        _has("_split_heads", "query_key_value", "dense", "inv_norm_factor"),
        _Falcon,
    ),
    "MptAttention": (_has("Wqkv", "out_proj", "softmax_scale", "clip_qkv"), _Mpt),
}
_ALIBI: Final = _Bloom, _Mpt


def own_attention(decoder: nn.Module) -> dict[nn.Module, type[OwnAttention]]:
    found: dict[nn.Module, type[OwnAttention]] = {}
    for module in decoder.modules():
        is_one, mixin = _KNOWN.get(type(module).__name__, (None, None))
        if is_one is not None and mixin is not None and is_one(module):
            found[module] = mixin
    return found


def refuse_compiled(view: ModelView, backend: bool | str) -> None:
    if backend is not False and view.own_attention:
        raise UnsupportedError(
            f"compile={backend!r}: {type(view.decoder).__name__} computes attention in its own code; use compile=False"
        )


def uses_alibi(decoder: nn.Module) -> bool:
    kinds = set(own_attention(decoder).values())
    return bool(kinds & {*_ALIBI}) or (
        _Falcon in kinds and bool(getattr(decoder, "use_alibi", False))
    )


def take_over_attention(
    own: Mapping[nn.Module, type[OwnAttention]], implementation: str
) -> None:
    module: Any
    for module, mixin in own.items():
        if not hasattr(module, "layer_idx"):
            module.layer_idx = getattr(module, "layer_id", None)
        mix_in(module, mixin, ring_implementation=implementation)
