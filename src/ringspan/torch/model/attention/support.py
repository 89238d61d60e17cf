"""Checks that a decoder's attention goes through transformers' interface and takes positions."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.attention.own import uses_alibi
from ringspan.torch.model.layers.decoder import without_attention
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.numbering import numbers_itself, takes_positions
from ringspan.torch.model.layers.view import ModelView
from ringspan.torch.model.weights.loading import filled

_TRIAL: Final = "ringspan_trial"


def refuse_attention(view: ModelView) -> None:
    """Raise UnsupportedError if the ring cannot take over attention; if it is not declared, two tokens are tried."""
    name, decoder, own = view.name, view.decoder, view.own_attention
    for path, module in decoder.named_modules():
        is_decoder = getattr(module, "is_decoder", None)
        sees_later = (
            is_decoder is False
            if module in own
            else getattr(module, "is_causal", True) is False
        )
        if (
            sees_later
            and not is_decoder
            and "cross" not in path
            and (module in own or isinstance(getattr(module, "query", None), nn.Linear))
        ):
            raise UnsupportedError(
                f"{name}: tokens see later ones ({path}), which a ring does not support; set is_decoder=True in its "
                "config to make it a causal language model"
            )
    if not (
        getattr(decoder, "_supports_attention_backend", False)
        or family_of(decoder.config).has_own_layers(decoder.config)
    ):
        reason = _why_not_consulted(view)
        if reason:
            raise UnsupportedError(
                f"{name} computes attention in its own code, not through transformers' AttentionInterface ({reason}); "
                "use a model whose attention goes through it"
            )
    if not (
        takes_positions(decoder)
        or uses_alibi(decoder)
        or numbers_itself(decoder) is not None
    ):
        raise UnsupportedError(
            f"{name} numbers its tokens itself (its decoder takes no position_ids), so that each rank would begin "
            "with 0; use a model whose decoder takes position_ids"
        )


@torch.no_grad()
def _why_not_consulted(view: ModelView) -> str:
    """Return why some layers do not call transformers' attention function, or "".

    The decoder runs on two tokens with an attention function that records its callers.
    """
    decoder, layers, others = (
        view.decoder,
        view.layers.values(),
        {*view.stateful.values(), *view.own_attention},
    )
    with filled(decoder, zeros=True):
        ids = torch.zeros(
            1, 2, dtype=torch.int64, device=next(decoder.parameters()).device
        )
        # A decoder that computes attention itself may fail without a mask; the callers up to then count.
        with (
            _recorded(decoder) as asking,
            suppress(Exception),
        ):
            decoder(input_ids=ids, use_cache=False)
    without = without_attention(decoder.config)
    silent = [
        layer
        for layer in layers
        if getattr(layer, "layer_idx", None) not in without
        and not any(module in asking or module in others for module in layer.modules())
    ]
    if not layers or not (
        asking or any(module in others for module in decoder.modules())
    ):
        return "no layer asks it"
    return f"{len(silent)} of {len(layers)} layers do not ask it" if silent else ""


@contextmanager
def _recorded(decoder: PreTrainedModel) -> Iterator[set[nn.Module]]:
    """Yield the set that collects modules as they call the attention function, which answers with zeros."""
    asking: set[nn.Module] = set()

    def attend(
        module: nn.Module,
        query: Tensor,
        _: Tensor,
        value: Tensor,
        *__: object,
        **___: object,
    ) -> tuple[Tensor, None]:
        asking.add(module)
        batch, heads, tokens, _size = query.shape
        return query.new_zeros(batch, tokens, heads, value.shape[-1]), None

    AttentionInterface.register(_TRIAL, attend)
    AttentionMaskInterface.register(_TRIAL, lambda **_: None)
    config = decoder.config
    before = (
        config._attn_implementation,
        getattr(config, "_experts_implementation", None),
    )
    config._attn_implementation = _TRIAL
    if before[1] is not None:
        # The trial's weights are one zero expanded to their shape, which grouped products of experts do not take.
        config._experts_implementation = "eager"
    try:
        yield asking
    finally:
        config._attn_implementation = before[0]
        if before[1] is not None:
            config._experts_implementation = before[1]
