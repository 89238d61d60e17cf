"""Hugging Face causal language models on the ring, through transformers' public attention and mask interfaces.

B batch, S global tokens, T local tokens, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from ringspan.core.arguments import FREE_CHUNK_TOKENS, FREE_NORM_TOKENS
from ringspan.core.errors import LayoutError, PeerMismatch, UnsupportedError
from ringspan.core.layout import Layout, LayoutName
from ringspan.core.mask import Mask, causal, documents, sliding_window
from ringspan.torch import kernels
from ringspan.torch.agreement import agree
from ringspan.torch.attention import ring_attention
from ringspan.torch.batch import IGNORED, document_positions
from ringspan.torch.embedding import sum_embedding_gradients
from ringspan.torch.feedforward import ChunkTokens, find_feedforwards, free_feedforwards
from ringspan.torch.loss import LossOptions, blockwise_cross_entropy
from ringspan.torch.mesh import tensor_axis
from ringspan.torch.modules import local_part, mix_in
from ringspan.torch.norm import find_norms
from ringspan.torch.offload import OffloadName
from ringspan.torch.remat import CheckpointName, checkpoint_layers
from ringspan.torch.rope import chunk_rotary_tables, set_global_length
from ringspan.torch.scores import Scores
from ringspan.torch.sums import Sum, SumOfGradients
from ringspan.torch.support import (
    LayerKind,
    decoder_of,
    finished_logits,
    head_sizes,
    layer_kinds,
    logit_scale,
    logit_softcap,
    refuse_route,
    refuse_unsupported,
)
from ringspan.torch.tensor_parallel import refuse_split, split_model, splits_vocabulary
from ringspan.torch.tokenwise import run_in_blocks


def parallelize(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    layout: LayoutName = "zigzag",
    route: str = "ring",
    wire: str = "exact",
    kernel: str = "auto",
    checkpoint: CheckpointName = "attention",
    layers_per_checkpoint: int = 1,
    loss_chunk_tokens: int = 1024,
    loss_chunk_vocabulary: int | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    feedforward_chunk_tokens: ChunkTokens = "auto",
    norm_chunk_tokens: ChunkTokens = "auto",
    offload: OffloadName = "none",
    compute_dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Put a decoder-only causal LM of transformers on the ring, in place; feed it what ``shard_batch`` returns.

    Attention becomes ``ring_attention`` over ``mesh["ring"]``; parameters, gradients and optimizer state are sharded
    over the ring and replicated over ``mesh["replicate"]`` (FSDP2); gradients are summed over all ranks, in float32.
    With an axis ``tp`` heads, feed-forward and vocabulary are split over it first, as transformers' plan for the model
    says (``ringspan.torch.tensor_parallel``).
    ``model(**batch).loss`` is the loss of the whole batch on every rank: the sum over all valid targets over their
    count (pass ``num_items_in_batch`` to count over several batches, for gradient accumulation). Without labels
    ``model(**batch)`` gives the local logits (B, T, V).

    Args:
        model: any model whose attention goes through transformers' AttentionInterface.
        mesh: from ``init_mesh``.
        layout: how sequences are split; ``shard_batch`` needs the same.
        route: how keys and values get to other ranks, see ``ring_attention``.
        wire: how they travel, see ``ring_attention``; ``exact`` changes nothing.
        kernel: what computes attention on each device, see ``ring_attention``.
        checkpoint: what layers keep for backward, see ``checkpoint_layers``.
        layers_per_checkpoint: consecutive layers of which only the first keeps its input, see ``checkpoint_layers``.
        loss_chunk_tokens: tokens whose logits exist at once.
        loss_chunk_vocabulary: vocabulary entries for which they do, all when None; see ``blockwise_cross_entropy``, for
            ``z_loss`` and ``label_smoothing`` too.
        feedforward_chunk_tokens: tokens that a feed-forward works on at once, see ``chunk_feedforwards``; 0 for all.
            ``auto`` takes 4,096 where that costs next to nothing: in checkpointed layers, of models whose feed-forwards
            can be cut and come last.
        norm_chunk_tokens: tokens that a norm works on at once, see ``chunk_norms``; 0 for all. ``auto`` takes 4,096 in
            models whose layers are checkpointed, for 16,384 local tokens and more.
        offload: where what checkpointing keeps waits for backward, see ``offload_activations``.
        compute_dtype: dtype that layers compute in (parameters keep theirs); the parameters' own when None.

    Raises:
        UnsupportedError: the model or its config asks for something that would not be exact; by name.
    """
    tp = tensor_axis(mesh)
    refuse_unsupported(model)
    decoder: Any = decoder_of(model)
    if tp is not None:
        refuse_split(model, tp.size())
    refuse_route(decoder.config, mesh["ring"].size(), route, wire, 1 if tp is None else tp.size())
    _refuse_kernel(decoder, kernel, compute_dtype, mesh["ring"].get_group())
    norm_from_tokens = 0
    if norm_chunk_tokens == "auto":
        norm_chunk_tokens, norm_from_tokens = 0 if checkpoint == "none" else FREE_CHUNK_TOKENS, FREE_NORM_TOKENS
    # Both try modules out, on this process alone: before attention is the ring's.
    if feedforward_chunk_tokens == "auto":
        feedforward_chunk_tokens, logs = FREE_CHUNK_TOKENS, mesh.get_rank() == int(mesh.mesh.min())
        feedforwards = free_feedforwards(model, checkpointed=checkpoint != "none", logs=logs)
    else:
        feedforwards = find_feedforwards(model) if feedforward_chunk_tokens else []
    norms = find_norms(decoder) if norm_chunk_tokens else []
    loss = LossOptions(
        chunk_tokens=loss_chunk_tokens,
        chunk_vocabulary=loss_chunk_vocabulary,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale(model.config),
        softcap=logit_softcap(model.config),
    )
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    ring = mesh["ring"].get_group()
    decoder.set_attn_implementation(_register(layout, ring, layer_kinds(decoder.config), route, wire, kernel))
    attention: Any
    for attention in decoder.modules():
        if getattr(attention, "attn_temperature_tuning", False):
            # Llama 4 counts local tokens for it; ``attend`` does the same with their global positions.
            attention.attn_temperature_tuning, attention.ring_temperature = False, not attention.use_rope
    decoder.config.use_cache = False
    checkpoint_layers(model, checkpoint, offload, layers_per_checkpoint)
    chunk_rotary_tables(decoder)
    sum_embedding_gradients(decoder)
    where = next(name for name, module in model.named_modules() if module is decoder)
    mix_in(model, RingCausalLM, ring_mesh=mesh, ring_layout=layout, ring_loss=loss, ring_decoder=where)
    if tp is not None:
        split_model(model, tp)
    if feedforwards:
        run_in_blocks(feedforwards, feedforward_chunk_tokens, "feedforward_chunk_tokens")
    if norms:
        run_in_blocks(norms, norm_chunk_tokens, "norm_chunk_tokens", from_tokens=norm_from_tokens)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    sharded = mesh["replicate", "ring"] if mesh["replicate"].size() > 1 else mesh["ring"]
    for module in (*layers, model):
        fully_shard(module, mesh=sharded, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global count, and gloo has no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _refuse_kernel(
    decoder: PreTrainedModel, kernel: str, compute_dtype: torch.dtype | None, ring: dist.ProcessGroup
) -> None:
    """Refuse, on every rank alike, a kernel that is none or cannot serve this model's attention on this device."""
    kernels.check_name(kernel)
    config, parameter = decoder.config, next(decoder.parameters())
    size = max(head_sizes(config))
    probe = torch.empty(1, 1, 1, size, dtype=compute_dtype or parameter.dtype, device=parameter.device)
    scores = Scores(1.0, softcap=getattr(config, "attn_logit_softcapping", None) or 0.0)
    refusal = kernels.why_not(kernel, probe, probe, scores)
    agree(ring, {"kernel": f"{kernel} ({refusal})" if refusal else kernel})
    if refusal:
        raise kernels.refused(kernel, refusal)


class RingCausalLM:
    """What ``parallelize`` adds to a model's class: one loss for the whole batch, without whole logits."""

    ring_mesh: DeviceMesh
    ring_layout: LayoutName
    ring_loss: LossOptions
    ring_decoder: str

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        document_lengths: Tensor | None = None,
        sequence_length: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Local tokens (B, T) and their positions -> the global loss, or local logits when there are no labels.

        ``document_lengths`` (B, documents), 0 behind the last one: tokens see their own document only, and positions
        count within it. ``sequence_length`` is that of the longest document without padding, with it when None.
        """
        for name, value in kwargs.items():
            if isinstance(value, Tensor):  # labels, a mask, images, sound
                raise UnsupportedError(
                    f"{name} of a sharded batch cannot be honoured; make the batch with rs.shard_batch"
                )
        if input_ids is None or position_ids is None:
            raise UnsupportedError("input_ids and position_ids are needed; make the batch with rs.shard_batch")
        ring, tp = self.ring_mesh["ring"], tensor_axis(self.ring_mesh)
        groups = [self.ring_mesh[axis].get_group() for axis in ("replicate", "ring")]
        layout = Layout(self.ring_layout, ring.size() * input_ids.shape[1], ring.size())
        _check_positions(position_ids, layout, ring, document_lengths)
        decoder = self.get_submodule(self.ring_decoder)
        set_global_length(decoder, layout.length if sequence_length is None else int(sequence_length))
        packed = None if document_lengths is None else _Packed(document_lengths, position_ids)
        if packed:
            kwargs["ring_packed"] = packed
        for axis in (ring, tp) if tp is not None else (ring,):
            agree(axis.get_group(), {"layout": self.ring_layout, "local batch": tuple(input_ids.shape)})
        count = _count_targets(shift_labels, input_ids, groups, tp, num_items_in_batch)
        others = {name: value for name, value in kwargs.items() if value is not None}
        hidden = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **others).last_hidden_state
        if packed and not packed.is_seen:
            raise UnsupportedError(
                f"{type(self).__name__.removeprefix('FSDP')} does not hand its keyword arguments on to attention, so "
                "packed documents would see each other; give it one document a sequence"
            )
        head = self.get_output_embeddings()
        if shift_labels is None:
            return CausalLMOutputWithPast(logits=finished_logits(head(hidden), self.config))
        # Evaluation is plain cross-entropy, whatever training adds to it.
        loss = self.ring_loss if self.training else replace(self.ring_loss, z_loss=0.0, label_smoothing=0.0)
        share = tp.get_group() if tp is not None and splits_vocabulary(head) else None
        total = blockwise_cross_entropy(
            (hidden if share is None else SumOfGradients.apply(hidden, share)).flatten(0, 1),
            local_part(head.weight),
            shift_labels.flatten(),
            bias=None if head.bias is None else local_part(head.bias),
            group=share,
            **asdict(loss),
        )
        return CausalLMOutputWithPast(loss=Sum.apply(total / count, groups))


class _Packed:
    """The documents of each sequence of a batch, and the local tokens' positions in them, on their way to the
    layers.
    """

    def __init__(self, lengths: Tensor, positions: Tensor) -> None:
        self.positions = positions
        rows = [tuple(length for length in row if length) for row in lengths.tolist()]
        self.rows = rows[:1] if len(set(rows)) == 1 else rows  # alike for all sequences: one attention does
        self.is_seen = False


@lru_cache(maxsize=64)
def _layer_mask(kind: LayerKind, length: int, lengths: tuple[int, ...] | None) -> Mask:
    """Whom the queries of a layer see in a sequence of some documents, or of one; chunks count within a document."""
    if kind.chunk is not None:
        whole = lengths or (length,)
        return documents(
            piece for each in whole for piece in (*[kind.chunk] * (each // kind.chunk), each % kind.chunk) if piece
        )
    if lengths is not None:
        return documents(lengths, window=kind.window)
    return causal() if kind.window is None else sliding_window(kind.window)


def _register(
    layout: LayoutName, ring: dist.ProcessGroup, kinds: tuple[LayerKind, ...], route: str, wire: str, kernel: str
) -> str:
    """Make this ring an attention implementation of transformers and return its name.

    ``kinds`` is what the config says of each layer; a layer that asks for something else is refused.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        ring_packed: _Packed | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        asked = {"attention_mask": attention_mask, "dropout": dropout or None}
        asked |= {name: kwargs.get(name) for name in ("position_bias", "head_mask", "indices")}
        for name, wanted in asked.items():
            if wanted is not None:
                raise UnsupportedError(f"{type(module).__name__} asks for {name}, which the ring does not support yet")
        layer = getattr(module, "layer_idx", 0)
        kind = kinds[layer]
        if sliding_window != kind.window:
            raise UnsupportedError(
                f"{type(module).__name__} {layer} asks for sliding_window={sliding_window}, its config for "
                f"{kind.window}"
            )
        length = query.shape[2] * dist.get_world_size(ring)
        if getattr(module, "ring_temperature", False):
            positions = torch.from_numpy(
                Layout(layout, length, dist.get_world_size(ring)).positions(dist.get_rank(ring))
            )
            factors = _temperature(module, ring_packed.positions if ring_packed else positions[None])
            query = (query * factors.to(query.device)).to(query.dtype)
        sequences: Sequence[tuple[int, ...] | None] = (None,)
        if ring_packed:
            ring_packed.is_seen, sequences = True, ring_packed.rows
        rows = [slice(None)] if len(sequences) == 1 else [slice(row, row + 1) for row in range(len(sequences))]
        parts = [
            ring_attention(
                *(x[part] for x in (query, key, value)),
                mask=_layer_mask(kind, length, lengths),
                layout=layout,
                group=ring,
                scale=scaling,
                softcap=softcap,
                sinks=s_aux,
                route=route,
                wire=wire,
                kernel=kernel,
            )
            for part, lengths in zip(rows, sequences, strict=True)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.transpose(1, 2), None

    settings = layout, ring.group_name, route, wire, kernel, kinds
    name = f"ringspan_{hashlib.sha256(repr(settings).encode()).hexdigest()[:16]}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _no_mask)
    return name


def _temperature(module: Any, positions: Tensor) -> Tensor:
    """Llama 4's factor on the queries of a layer without RoPE: ``1 + attn_scale log(1 + floor((p + 1) / floor_scale))``
    at position p. positions (B, T) -> (B, 1, T, 1).
    """
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    return (torch.log1p(steps) * module.attn_scale + 1.0)[:, None, :, None]


def _no_mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """No S x S mask is ever built: the schedule knows who sees whom."""
    if attention_mask is not None:
        raise UnsupportedError(
            "attention_mask of a sharded batch cannot be honoured; make the batch with rs.shard_batch"
        )


def _check_positions(positions: Tensor, layout: Layout, ring: DeviceMesh, document_lengths: Tensor | None) -> None:
    """The batch must have been split by the layout of the model: another one would be silently wrong."""
    expected = torch.from_numpy(layout.positions(ring.get_local_rank()))
    if document_lengths is not None:
        expected = document_positions(document_lengths, layout.padded_length)[:, expected]
    if positions.shape[-1] != layout.tokens_per_rank or not bool((positions == expected.to(positions.device)).all()):
        raise LayoutError(
            f"position_ids are not those of rank {ring.get_local_rank()} in the layout {layout.name}; "
            f"use rs.shard_batch(batch, mesh, layout={layout.name!r})"
        )


def _count_targets(
    labels: Tensor | None,
    tokens: Tensor,
    groups: list[dist.ProcessGroup],
    tp: DeviceMesh | None,
    given: int | Tensor | None,
) -> Tensor:
    """Valid targets of the whole batch (at least 1), in a reduction that also notices ranks with unequal lengths.

    The ranks of the axis ``tp`` have the same tokens.
    """
    length = tokens.shape[1]
    valid = 0 if labels is None else int((labels != IGNORED).sum())
    counts = torch.tensor([valid, length, length * length, 1], dtype=torch.int64, device=tokens.device)
    for group in groups if tp is None else [*groups, tp.get_group()]:
        dist.all_reduce(counts, group=group)
    total, lengths, squares, ranks = counts.tolist()
    if ranks * squares != lengths * lengths:
        raise PeerMismatch(
            f"the ranks were given unequal lengths: this one {length} tokens, {lengths / ranks} on average"
        )
    count = total // (1 if tp is None else tp.size()) if given is None else int(given)
    return torch.tensor(float(max(count, 1)), device=tokens.device)
