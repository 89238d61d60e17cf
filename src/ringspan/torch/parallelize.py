"""Hugging Face causal language models on the ring, through transformers' public attention and mask interfaces.

B batch, S global tokens, T local tokens, V vocabulary.
"""

import hashlib
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ringspan.core.arguments import FREE_CHUNK_TOKENS, FREE_NORM_TOKENS
from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.layout import Layout, layout_name
from ringspan.core.mask import Mask, causal, documents, sliding_window
from ringspan.core.names import (
    CheckpointName,
    ChunkTokens,
    CommDtypeName,
    KernelName,
    LayoutName,
    OffloadName,
    kernel_name,
)
from ringspan.core.numbers import check_whole
from ringspan.torch import kernels
from ringspan.torch.attention.cached import current_turn
from ringspan.torch.attention.op import ring_attention
from ringspan.torch.consistency.calls import Call, check_call
from ringspan.torch.consistency.fixed import refuse_copy, structure_of
from ringspan.torch.consistency.loop_watch import watch_loop
from ringspan.torch.consistency.optimizers import watch_optimizers
from ringspan.torch.consistency.weights import describe_weights, share_weights
from ringspan.torch.data.loss_blocks import LossOptions
from ringspan.torch.generate.model import RingGenerator
from ringspan.torch.kernels.score_mod import Scores
from ringspan.torch.layers.blockwise import run_in_blocks
from ringspan.torch.layers.decoder import LayerKind, decoder_of, head_sizes, layer_kinds, logit_scale, logit_softcap
from ringspan.torch.layers.embedding import sum_embedding_gradients
from ringspan.torch.layers.feedforward import find_feedforwards, free_feedforwards
from ringspan.torch.layers.head import kind_of_head, refuse_blocks_of_vocabulary, vocabularies
from ringspan.torch.layers.modules import mix_in, own_config
from ringspan.torch.layers.norm import find_norms
from ringspan.torch.layers.rope import chunk_rotary_tables
from ringspan.torch.layers.router_loss import RouterLoss, find_router_loss, no_router_loss, record_routers
from ringspan.torch.memory.checkpointing import check_checkpointing, checkpoint_layers
from ringspan.torch.memory.sharding import shard_weights
from ringspan.torch.model.adapters import base_of, is_peft, put_on_ring
from ringspan.torch.model.causal_lm import Packed, RingCausalLM
from ringspan.torch.model.config_changes import copy_configs
from ringspan.torch.model.forward_arguments import UNSAID, Unsaid, check_attention
from ringspan.torch.model.support import refuse_route, refuse_unsupported
from ringspan.torch.runtime.mesh import check_mesh, tensor_axis
from ringspan.torch.tensor_parallel.split import refuse_split, split_model

_OVER_CACHE: Final = ("use_cache", "past_key_values", "logits_to_keep")  # which a pass over a cache honours elsewhere
# How many models each mesh has been given, alike on all of its ranks.
_numbers: Final[dict[tuple[int, ...], Iterator[int]]] = {}


def parallelize(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    layout: LayoutName = "zigzag",
    route: str = "ring",
    comm_dtype: CommDtypeName = "exact",
    kernel: KernelName = "auto",
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
    watchdog: bool = True,
) -> PreTrainedModel:
    """Put a decoder-only causal LM of transformers on the ring, in place; feed it what ``shard_batch`` returns.

    Attention becomes ``ring_attention`` over ``mesh["ring"]``; parameters, gradients and optimizer state are sharded
    over the ring and replicated over ``mesh["replicate"]`` (FSDP2); gradients are summed over all ranks, in float32.
    With an axis ``tp`` heads, feed-forward and vocabulary are split over it first, as transformers' plan for the model
    says (``ringspan.torch.tensor_parallel.split``).
    ``model(**batch).loss`` is the loss of the whole batch on every rank: the sum over all valid targets over their
    count (pass ``num_items_in_batch`` to count over several batches, for gradient accumulation). Without labels
    ``model(**batch)`` gives the local logits (B, T, V).

    A model that PEFT wraps (``get_peft_model``) comes back wrapped, and saves its adapter, see
    ``ringspan.torch.model.adapters``. What no model can do afterwards raises, see ``ringspan.torch.consistency.fixed``.

    Args:
        model: any model whose attention goes through transformers' AttentionInterface, wherever it is: its shards go
            to the mesh's devices layer by layer. One on the meta device gets its weights afterwards (``to_empty``,
            then ``set_model_state_dict`` of ``torch.distributed``).
        mesh: from ``init_mesh``.
        layout: how sequences are split; ``shard_batch`` needs the same.
        route: how keys and values get to other ranks, see ``ring_attention``.
        comm_dtype: what they are sent as, see ``ring_attention``; ``exact`` changes nothing.
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
        watchdog: end this process, with a line that says whom it waited for, when a rank dies, or does not come to a
            call within the time-out of the process group (``ringspan.torch.consistency.loop_watch``).

    Raises:
        UnsupportedError: the model or its config asks for something that would not be exact.
        ConfigError, LayoutError: an option that is none, or does not go with the others.
        PeerMismatch: the ranks were given different models or options.

    Each is raised on every rank alike, and leaves the model as it was. Where ranks have other weights, all of them get
    those of the first.
    """
    options = {name: value for name, value in locals().items() if name not in ("model", "mesh", "watchdog")}
    check_mesh(mesh)
    given, parts = model, None
    try:
        model = base_of(given) if is_peft(given) else given
        parts = _check(model, mesh, **options)
        facts = {name: str(value) for name, value in options.items()} | describe_weights(model)
        facts |= {f"config.{name}": str(value) for name, value in model.config.to_dict().items()}
        call = Call("parallelize", {"model": type(model).__name__, "watchdog": watchdog} | facts)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        call = Call("parallelize", error=error)
    check_call(mesh, call)
    assert parts is not None, "an error is raised there"
    share_weights(model, mesh)
    # Nothing is refused any more: from here on the model changes.
    own_config(model)
    decoder: Any = parts.decoder
    ring, kinds = mesh["ring"].get_group(), layer_kinds(decoder.config)
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    decoder.set_attn_implementation(_register(type(decoder).__name__, layout, ring, kinds, route, comm_dtype, kernel))
    attention: Any
    for attention in decoder.modules():
        if getattr(attention, "attn_temperature_tuning", False):
            # Llama 4 counts local tokens for it; ``attend`` does the same with their global positions.
            attention.attn_temperature_tuning, attention.ring_temperature = False, not attention.use_rope
    if parts.router is not None:
        record_routers(model, parts.router)
    checkpoint_layers(model, checkpoint, offload, layers_per_checkpoint)
    chunk_rotary_tables(decoder)
    sum_embedding_gradients(decoder)
    where = next(name for name, module in model.named_modules() if module is decoder)
    mix_in(
        model,
        RingGenerator,
        ring_mesh=mesh,
        ring_layout=layout,
        ring_loss=parts.loss,
        ring_decoder=where,
        ring_vocabularies=parts.vocabularies,
        ring_head=kind_of_head(parts.head),
        ring_configs=copy_configs((model.config, decoder.config)),
        ring_router=parts.router,
    )
    if (tp := tensor_axis(mesh)) is not None:
        split_model(model, tp)
    recorder = None if parts.router is None else parts.router.recorder
    for modules, chunk_tokens, option, from_tokens in parts.in_blocks:
        run_in_blocks(modules, chunk_tokens, option, from_tokens=from_tokens, recorder=recorder)
    shard_weights(model, layers, mesh, compute_dtype)
    watch_optimizers(model)
    if watchdog:
        watch_loop(mesh)
    kind: Any = type(model)
    kind.__deepcopy__, kind.ring_structure = refuse_copy, structure_of(model)
    kind.ring_loss_function, kind.ring_number = staticmethod(model.loss_function), _next_number(mesh)
    if given is not model:
        put_on_ring(given)
    return given


def _next_number(mesh: DeviceMesh) -> str:
    """By what ranks tell the models of one mesh apart."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    return f"number {next(_numbers.setdefault(ranks, count(1)))}"


class _Parts(NamedTuple):
    """What ``parallelize`` has found in a model that it may change."""

    decoder: PreTrainedModel
    head: nn.Module
    vocabularies: tuple[int, int]
    loss: LossOptions
    in_blocks: list[tuple[list[nn.Module], int, str, int]]
    """Modules to run in blocks of so many tokens, by which option, and from how many tokens on."""
    router: RouterLoss | None


def _check(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    layout: LayoutName,
    route: str,
    comm_dtype: CommDtypeName,
    kernel: KernelName,
    checkpoint: CheckpointName,
    layers_per_checkpoint: int,
    loss_chunk_tokens: int,
    loss_chunk_vocabulary: int | None,
    z_loss: float,
    label_smoothing: float,
    feedforward_chunk_tokens: ChunkTokens,
    norm_chunk_tokens: ChunkTokens,
    offload: OffloadName,
    compute_dtype: torch.dtype | None,
) -> _Parts:
    """Raise what ``parallelize`` cannot do with a model, and leave it as it is."""
    tp = tensor_axis(mesh)
    if isinstance(model, RingCausalLM):
        raise UnsupportedError(f"{type(model).__name__.removeprefix('FSDP')} is on a ring already")
    refuse_unsupported(model)
    decoder: Any = decoder_of(model)
    if tp is not None:
        refuse_split(model, tp.size())
    layout_name(layout)
    is_real = isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point
    if compute_dtype is not None and not is_real:
        raise ConfigError(f"compute_dtype must be a dtype such as torch.bfloat16, or None, got {compute_dtype!r}")
    refuse_route(decoder.config, mesh["ring"].size(), route, comm_dtype, 1 if tp is None else tp.size())
    _refuse_kernel(decoder, kernel, compute_dtype, mesh["ring"])
    check_checkpointing(model, checkpoint, offload, layers_per_checkpoint)
    in_blocks: list[tuple[list[nn.Module], int, str, int]] = []
    # Both try modules out, on this process alone: before attention is the ring's.
    option = "feedforward_chunk_tokens"
    if feedforward_chunk_tokens == "auto":
        logs = mesh.get_rank() == int(mesh.mesh.min())
        feedforwards = free_feedforwards(model, checkpointed=checkpoint != "none", logs=logs)
        in_blocks.append((feedforwards, FREE_CHUNK_TOKENS, option, 0))
    elif feedforward_chunk_tokens != 0:
        check_whole(option, feedforward_chunk_tokens, 0)
        in_blocks.append((find_feedforwards(model), feedforward_chunk_tokens, option, 0))
    option = "norm_chunk_tokens"
    if norm_chunk_tokens == "auto":
        norms = [] if checkpoint == "none" else find_norms(decoder)
        in_blocks.append((norms, FREE_CHUNK_TOKENS, option, FREE_NORM_TOKENS))
    elif norm_chunk_tokens != 0:
        check_whole(option, norm_chunk_tokens, 0)
        in_blocks.append((find_norms(decoder), norm_chunk_tokens, option, 0))
    head: Any = model.get_output_embeddings()
    refuse_blocks_of_vocabulary(head, loss_chunk_vocabulary)
    loss = LossOptions(
        chunk_tokens=loss_chunk_tokens,
        chunk_vocabulary=loss_chunk_vocabulary,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale(model.config),
        softcap=logit_softcap(model.config),
    )
    router = find_router_loss(model)
    if router is None and getattr(decoder.config, "output_router_logits", False):
        raise no_router_loss(type(model).__name__)
    return _Parts(decoder, head, vocabularies(model), loss, in_blocks, router)


def _refuse_kernel(decoder: PreTrainedModel, kernel: str, compute_dtype: torch.dtype | None, ring: DeviceMesh) -> None:
    """Refuse a kernel that is none or cannot serve this model's attention on the ring's devices, wherever the model
    still is.
    """
    kernel_name(kernel)
    config, dtype = decoder.config, compute_dtype or next(decoder.parameters()).dtype
    probe = torch.empty(1, 1, 1, max(head_sizes(config)), dtype=dtype, device=ring.device_type)
    scores = Scores(1.0, softcap=getattr(config, "attn_logit_softcapping", None) or 0.0)
    if refusal := kernels.why_not(kernel, probe, probe, scores):
        raise kernels.refused(kernel, refusal)


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
    decoder: str,
    layout: LayoutName,
    ring: dist.ProcessGroup,
    kinds: tuple[LayerKind, ...],
    route: str,
    comm_dtype: CommDtypeName,
    kernel: KernelName,
) -> str:
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
        ring_packed: Packed | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        turn = current_turn()
        if turn is not None:
            kwargs = {name: value for name, value in kwargs.items() if name not in _OVER_CACHE}
        check_attention(module, kwargs | {"attention_mask": attention_mask, "dropout": dropout})
        kind = _kind_of_layer(module, kinds, sliding_window, masked)
        if turn is not None:
            if getattr(module, "ring_temperature", False):
                query = (query * _temperature(module, turn.positions[None]).to(query.device)).to(query.dtype)
            scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap or 0.0)
            return turn.attend(query, key, value, kind, scores, s_aux, kernel).transpose(1, 2), None
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
                comm_dtype=comm_dtype,
                kernel=kernel,
            )
            for part, lengths in zip(rows, sequences, strict=True)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.transpose(1, 2), None

    def no_mask(*, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any) -> None:
        """No S x S mask is ever built: the schedule knows who sees whom."""
        if attention_mask is not None and not bool(attention_mask.all()):  # some decoders make one of ones
            raise UnsupportedError(
                "attention_mask of a sharded batch cannot be honoured; make the batch with rs.shard_batch"
            )
        masked.add(local_size)

    settings = decoder, layout, ring.group_name, route, comm_dtype, kernel, kinds
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
    layer = getattr(module, "layer_idx", None)
    if layer is None and len(set(kinds)) > 1:
        raise UnsupportedError(f"{type(module).__name__} does not say which layer it is of (layer_idx), which differ")
    kind = kinds[layer or 0]
    if asked is UNSAID:
        return kind if kind.window in masked else kind._replace(window=None)
    if asked != kind.window:
        raise UnsupportedError(
            f"layer {layer} of {type(module).__name__} attends to {_reach(asked)}, but its config says "
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
