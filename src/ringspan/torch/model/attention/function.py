"""The ring as an attention function of transformers: who sees whom in each layer, and what a layer may ask for.

B batch, T local tokens.
"""

import hashlib
from collections.abc import Container, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.step_config import StepConfig
from ringspan.torch.attention.cached import current_turn
from ringspan.torch.attention.op import in_autocast, ring_attention
from ringspan.torch.attention.traced import layer_attention, mask_of
from ringspan.torch.kernels.score_mod import Scores
from ringspan.torch.layers.decoder import LayerKind
from ringspan.torch.model.forward_arguments import UNSAID, Unsaid, check_attention
from ringspan.torch.model.local_pass import Packed
from ringspan.torch.multimodal.token_types import Blocks
from ringspan.torch.recurrence.current import current_pass

_TAKE_MASKS: Final = ("MptModel",)  # decoders that call a method of their mask, which nobody looks at then
_OVER_CACHE: Final = ("use_cache", "past_key_values", "logits_to_keep")  # which a pass over a cache honours elsewhere


def register_attention(decoder: str, ring: dist.ProcessGroup, kinds: tuple[LayerKind, ...], config: StepConfig) -> str:
    """Make this ring an attention implementation of transformers for a kind of decoder and return its name.

    ``kinds`` is what the config says of each layer; a layer that asks for something else is refused.
    """
    masked: set[int | None] = set()  # windows of the masks that the decoder has made, None for one without

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | Unsaid | None = UNSAID,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        ring_packed: Packed | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        is_program = torch.compiler.is_compiling()  # of which neither can be asked, and for which neither is there
        sequences = None if is_program else current_pass()
        if ring_packed is None and sequences is not None:  # not every layer hands its arguments on
            ring_packed = sequences.packed
        turn = None if is_program else current_turn()
        if turn is not None:
            kwargs = {name: value for name, value in kwargs.items() if name not in _OVER_CACHE}
        check_attention(module, kwargs | {"attention_mask": attention_mask, "dropout": dropout})
        kind = _kind_of_layer(module, kinds, sliding_window, masked)
        if turn is not None:
            if getattr(module, "ring_temperature", False):
                query = (query * _temperature(module, turn.positions[None]).to(query.device)).to(query.dtype)
            scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap or 0.0)
            query, key, value = in_autocast(query, key, value)
            key, value = key.to(query.dtype), value.to(query.dtype)  # written under autocast, or not
            out = turn.attend(query, key, value, kind, scores, s_aux, config.kernel)
            return out.transpose(1, 2).contiguous(), None  # some models view it as (batch, tokens, hidden size)
        if is_program and not getattr(module, "ring_temperature", False):
            out = layer_attention(
                *(query, key, value, ring_packed.lengths if ring_packed else None),
                window=kind.window,
                chunk=kind.chunk,
                layout=config.layout,
                group=ring,
                scale=scaling,
                softcap=softcap,
                sinks=s_aux,
                route=config.route,
                comm_dtype=config.comm_dtype,
                kernel=config.kernel,
            )
            return out.transpose(1, 2), None
        length = query.shape[2] * dist.get_world_size(ring)
        if getattr(module, "ring_temperature", False):
            if ring_packed:
                positions = ring_packed.positions
            else:
                layout = batch_layout(config.layout, length, dist.get_world_size(ring))
                positions = torch.from_numpy(layout.positions(dist.get_rank(ring)))[None]
            factors = _temperature(module, positions)
            query = (query * factors.to(query.device)).to(query.dtype)
        documents_of: Sequence[tuple[int, ...] | None] = (None,)
        blocks_of: Sequence[Blocks] = ((),)
        split = None
        if ring_packed:
            split = ring_packed.split
            ring_packed.is_seen, documents_of, blocks_of = True, ring_packed.rows, ring_packed.blocks
        rows = [slice(None)] if len(documents_of) == 1 else [slice(row, row + 1) for row in range(len(documents_of))]
        parts = [
            ring_attention(
                *(x[part] for x in (query, key, value)),
                mask=mask_of(length, lengths, kind.window, kind.chunk, blocks),
                layout=config.layout if split is None else split.of_row(row),  # pyright: ignore[reportArgumentType]
                group=ring,
                scale=scaling,
                softcap=softcap,
                slopes=alibi_slopes,
                sinks=s_aux,
                route=config.route,
                comm_dtype=config.comm_dtype,
                kernel=config.kernel,
            )
            for row, (part, lengths, blocks) in enumerate(zip(rows, documents_of, blocks_of, strict=True))
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.transpose(1, 2), None

    def no_mask(*, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
        """No S x S mask is ever built: the schedule knows who sees whom."""
        if attention_mask is not None and not bool(attention_mask.all()):  # some decoders make one of ones
            raise UnsupportedError(
                "attention_mask of a sharded batch cannot be honoured; make the batch with rs.shard_batch"
            )
        masked.add(local_size)
        return torch.zeros(()) if decoder in _TAKE_MASKS else None

    settings = decoder, config.layout, ring.group_name, config.route, config.comm_dtype, config.kernel, kinds
    name = f"ringspan_{hashlib.sha256(repr(settings).encode()).hexdigest()[:16]}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, no_mask)
    return name


def _kind_of_layer(
    module: Any, kinds: Sequence[LayerKind], asked: int | Unsaid | None, masked: Container[int | None]
) -> LayerKind:
    """Whom the queries of an attention module see: what its config says, where the module and its masks agree.

    On one process a window is one of the mask. Not every model gives it to attention too, and not every model that has
    one in its config makes such a mask (Moshi).

    Raises:
        UnsupportedError: they do not agree.
    """
    if hasattr(module, "ring_kind"):  # a compiled layer's, whose program is that of all layers of the kind
        kind = module.ring_kind
    else:
        layer = getattr(module, "layer_idx", None)
        if layer is None and len(set(kinds)) > 1:
            raise UnsupportedError(
                f"{type(module).__name__} does not say which layer it is of (layer_idx), which differ"
            )
        kind = kinds[layer or 0]
    if asked is UNSAID:
        return kind if kind.window in masked else kind._replace(window=None)
    if asked != kind.window:
        number = getattr(module, "layer_idx", None)
        raise UnsupportedError(
            f"layer {number} of {type(module).__name__} attends to {_reach(asked)}, but its config says "
            f"{_reach(kind.window)}; set layer_types and sliding_window of the config to what the layers do"
        )
    return kind


def _reach(window: Any) -> str:
    return "all earlier tokens" if window is None else f"the last {window} tokens"


def _temperature(module: Any, positions: Tensor) -> Tensor:
    """Llama 4's factor on the queries of a layer without RoPE: ``1 + attn_scale log(1 + floor((p + 1) / floor_scale))``
    at position p. positions (B, T) -> (B, 1, T, 1).
    """
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    return (torch.log1p(steps) * module.attn_scale + 1.0)[:, None, :, None]
