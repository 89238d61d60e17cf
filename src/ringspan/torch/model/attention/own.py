"""Attention in a model's own code, handed to the ring by a mixin of its family."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.layers.cache_names import given_cache
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.modules import Mixin, forward_of, mix_in
from ringspan.torch.model.layers.view import ModelView


class OwnAttention(Mixin):
    """Base of mixins that pass a module's queries, keys and values to the ring in place of its own attention.

    A subclass is put before the class of the module, so that ``self`` is the module: it overrides the method that
    computes attention, and calls ``attend`` in it (``Family.attention``).
    """

    ring_implementation: str
    ring_needs: tuple[str, ...] = ()
    """Attributes that a module must have; without them the mixin is not for its release of transformers."""

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


class InlineAttention(OwnAttention):
    """Base for modules that compute attention in ``forward``: a subclass has ``computed(given)``.

    ``given`` are the arguments of ``forward`` by name; ``computed`` returns what the module's forward returns.
    """

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


def own_attention(decoder: PreTrainedModel) -> dict[nn.Module, type[OwnAttention]]:
    """Return the modules with attention in their own code, each with the mixin that passes it to the ring."""
    known: Mapping[str, Any] = family_of(decoder.config).attention
    found: dict[nn.Module, type[OwnAttention]] = {}
    for module in decoder.modules() if known else ():
        mixin = known.get(type(module).__name__)
        if mixin is not None and all(
            hasattr(module, name) for name in mixin.ring_needs
        ):
            found[module] = mixin
    return found


def refuse_compiled(view: ModelView, backend: bool | str) -> None:
    if backend is not False and view.own_attention:
        raise UnsupportedError(
            f"compile={backend!r}: {type(view.decoder).__name__} computes attention in its own code; use compile=False"
        )


def uses_alibi(decoder: PreTrainedModel) -> bool:
    return family_of(decoder.config).has_alibi(decoder.config)


def take_over_attention(
    own: Mapping[nn.Module, type[OwnAttention]], implementation: str
) -> None:
    module: Any
    for module, mixin in own.items():
        if not hasattr(module, "layer_idx"):
            module.layer_idx = getattr(module, "layer_id", None)
        mix_in(module, mixin, ring_implementation=implementation)
