"""Ring attention as an attention function of transformers."""

import hashlib
from collections.abc import Container, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.layer_mask import CAUSAL, LayerMask
from ringspan.core.step_config import StepConfig
from ringspan.torch.engine.attention.cached import Turn, current_turn
from ringspan.torch.engine.attention.latents import latent_attention
from ringspan.torch.engine.attention.op import attend_to
from ringspan.torch.engine.attention.request import Request, in_autocast
from ringspan.torch.engine.attention.traced import layer_attention, note_masks, parts_of
from ringspan.torch.engine.recurrence.current import SequencePart, current_pass
from ringspan.torch.model.attention.call import AttentionCall, Rows
from ringspan.torch.model.attention.latents import (
    absorbed_attention,
    absorbs,
    expansion_of,
)
from ringspan.torch.model.forward_arguments import UNSAID, Unsaid, check_attention
from ringspan.torch.model.layers.cache_names import NAMES
from ringspan.torch.model.layers.family import CONVENTIONS, Family
from ringspan.torch.model.local_pass import Packed
from ringspan.torch.model.mechanism import Attends

# Arguments of a pass over a cache that are handled before attention.
_OVER_CACHE: Final = ("use_cache", *NAMES, "logits_to_keep")


def register_attention(
    decoder: str,
    ring: dist.ProcessGroup,
    kinds: tuple[LayerMask, ...],
    config: StepConfig,
    *,
    attends: Attends | None = None,
    family: Family = CONVENTIONS,
) -> str:
    """Register this ring as an attention implementation for a decoder of these kinds of layers; return its name.

    ``attends``, if given, sees every call first, and may compute it in place of the ring.
    """
    # Windows of the masks that the decoder has asked for; None stands for a mask without a window. A layer that passes
    # no window has the window of its config only if the decoder has asked for such a mask, or the family sets it.
    masked: set[int | None] = set()
    if family.layer_masks is not None:
        masked.update(kind.window for kind in kinds)
    note_masks([*kinds, CAUSAL])

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
        """Attend over the ring or a cache: local (B, H, T, D) to (B, T, H, D), and no weights.

        The signature is that of transformers' attention functions. Layers attend under the mask of their kind, unless
        ``attends`` takes the call.
        """
        # A compiled program cannot read the current pass or turn, and is not used where it would need them.
        is_program = torch.compiler.is_compiling()
        # The pass has the documents too, because not every layer passes ``ring_packed`` on.
        sequences = None if is_program else current_pass()
        if ring_packed is None and sequences is not None:
            ring_packed = sequences.packed
        turn = None if is_program else current_turn()
        if turn is not None:
            kwargs = {
                name: value for name, value in kwargs.items() if name not in _OVER_CACHE
            }
        call = None
        if attends is not None:
            tokens = query.shape[2] * ring.size()
            call = attends(
                AttentionCall(
                    module=module,
                    query=query,
                    key=key,
                    value=value,
                    mask=attention_mask,
                    further=kwargs,
                    scale=scaling,
                    sinks=s_aux,
                    ring=ring,
                    turn=turn,
                    rows_under=partial(_rows, ring_packed, tokens, config=config),
                )
            )
            key, value = call.key, call.value
            attention_mask, kwargs = call.mask, call.further
        check_attention(
            module, kwargs | {"attention_mask": attention_mask, "dropout": dropout}
        )
        if call is not None and call.compute is not None:
            return call.compute().contiguous(), None
        kind = None if call is None else call.kind
        if kind is None:
            kind = _kind_of_layer(module, kinds, sliding_window, masked)
        asked = Request(
            q=query,
            k=key,
            v=value,
            group=ring,
            scale=scaling,
            softcap=softcap,
            slopes=alibi_slopes,
            sinks=s_aux,
            route=config.route,
            sent=config.sent,
            kernel=config.kernel,
        )
        if turn is not None:
            out = _over_cache(module, asked, turn, kind)
        elif is_program and not _has_scale(module):
            lengths = ring_packed.lengths if ring_packed else None
            out = layer_attention(
                asked,
                lengths,
                config.layout,
                ring,
                kind,
            )
            out = out.transpose(1, 2)
        else:
            part = None if sequences is None else sequences.part
            out = _over_ring(module, asked, ring_packed, ring, kind, config, part)
        # As transformers' own functions return it: some models call view(B, T, H * D) on it.
        return out.contiguous(), None

    def no_mask(
        *,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        **kwargs: object,
    ) -> Tensor | None:
        """Return no mask: the schedule knows the visible keys, so no S x S mask is built."""
        # Some decoders build a mask of ones, which hides nothing.
        if attention_mask is not None and not bool(attention_mask.all()):
            raise UnsupportedError(
                "attention_mask of a sharded batch cannot be honoured; make the batch with rs.shard_batch"
            )
        masked.add(local_size)
        if attends is not None:
            # Modules that combine a mask with what they choose take an empty one.
            return torch.zeros(1, 1, 1, 0, dtype=torch.bool)
        return torch.zeros(()) if family.takes_mask else None

    settings = decoder, ring.group_name, kinds, config, family.name
    name = f"ringspan_{hashlib.sha256(repr(settings).encode()).hexdigest()[:16]}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, no_mask)
    return name


def _over_cache(
    module: nn.Module, asked: Request, turn: Turn, kind: LayerMask
) -> Tensor:
    """Return attention (B, T, H, D) of new tokens to the keys that all ranks hold in the cache."""
    query, key, value = asked.q, asked.k, asked.v
    if _has_scale(module):
        query = _scaled(module, query, turn.positions[None])
    scale = query.shape[-1] ** -0.5 if asked.scale is None else asked.scale
    query, key, value = in_autocast(query, key, value)
    # Earlier tokens may have been cached under another autocast dtype.
    key, value = (
        key.to(query.dtype),
        value.to(query.dtype),
    )

    def attend(query: Tensor) -> Tensor:
        return turn.attend(asked._replace(q=query, k=key, v=value, scale=scale), kind)

    out = (
        absorbed_attention(module, query, value, attend)
        if absorbs(module, turn)
        else attend(query)
    )
    return out.transpose(1, 2)


def _over_ring(
    module: nn.Module, asked: Request, packed: Packed | None, ring: dist.ProcessGroup, kind: LayerMask,
    config: StepConfig, of_text: SequencePart | None,
) -> Tensor:  # fmt: skip
    """Attend over the ring, each row under its documents' mask: (B, T, H, D).

    ``of_text`` is the part of the sequences that is computed now, None if they are computed whole.
    """
    length = asked.q.shape[2] * ring.size() if of_text is None else of_text.length
    if _has_scale(module):
        if packed:
            positions = packed.positions
        else:
            layout = (
                batch_layout(config.layout, length, ring.size())
                if of_text is None
                else of_text.layout
            )
            positions = torch.from_numpy(layout.positions(dist.get_rank(ring)))[None]
        asked = asked._replace(q=_scaled(module, asked.q, positions))
    expansion = expansion_of(module, asked.q, asked.k)
    parts: list[Tensor] = []
    for number, (part, mask, layout) in enumerate(_rows(packed, length, kind, config)):
        request = asked.of_rows(part)._replace(mask=mask, layout=layout)
        if expansion is not None:
            parts.append(latent_attention(request, expansion))
        else:
            parts.append(
                attend_to(request)
                if of_text is None
                else of_text.attend((module, number), request)
            )
    if len(parts) == 1:
        return parts[0].transpose(1, 2)
    return torch.cat([part.transpose(1, 2) for part in parts])


def _rows(
    packed: Packed | None, length: int, kind: LayerMask, config: StepConfig
) -> list[Rows]:
    """Return the slices of the batch that share a mask, each with its mask over ``length`` tokens and its layout.

    Without documents, or if all rows have the same ones, there is one slice. It marks ``packed`` as seen.
    """
    if not packed:
        layout: Any = config.layout
        return [Rows(slice(None), kind.in_text(length), layout)]
    split = packed.split
    packed.is_seen, documents_of, blocks_of = True, packed.rows, packed.blocks
    parts = parts_of(len(documents_of))
    return [
        Rows(
            part,
            kind.in_text(length, lengths, blocks),
            config.layout if split is None else split.of_row(row),  # pyright: ignore[reportArgumentType]
        )
        for row, (part, lengths, blocks) in enumerate(
            zip(parts, documents_of, blocks_of, strict=True)
        )
    ]


def _kind_of_layer(
    module: Any,
    kinds: Sequence[LayerMask],
    asked: int | Unsaid | None,
    masked: Container[int | None],
) -> LayerMask:
    """Return a module's kind by its config; UnsupportedError if module or masks disagree (some pass no window on)."""
    # A compiled program serves all layers of a kind, so it reads the kind and not the layer's number.
    kind = module.__dict__.get("ring_kind")
    if kind is None:
        layer = getattr(module, "layer_idx", None)
        if layer is None and len(set(kinds)) > 1:
            raise UnsupportedError(
                f"{type(module).__name__} must say which layer it is of (layer_idx), since layers differ"
            )
        kind = kinds[layer or 0]
    if asked is UNSAID:
        return kind if kind.window is None or kind.window in masked else CAUSAL
    if asked != kind.window:
        number = getattr(module, "layer_idx", None)
        does = LayerMask(window=asked).in_words
        raise UnsupportedError(
            f"layer {number} of {type(module).__name__} attends to {does}, but its config says {kind.in_words}; set "
            "layer_types and sliding_window of the config to what the layers do"
        )
    return kind


def _has_scale(module: object) -> bool:
    # Not ``getattr``: a module without it would search its parameters and raise, in every layer.
    return module.__dict__.get("ring_query_scale") is not None


def _scaled(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Return queries (B, H, T, D) times the layer's factors for their positions (B, T)."""
    # Like the model's own code, in float32; a model in float64 has none of that rounding.
    positions = positions.to(torch.promote_types(torch.float32, query.dtype))
    factors = module.ring_query_scale(positions)[:, None, :, None]
    return (query * factors.to(query.device)).to(query.dtype)
