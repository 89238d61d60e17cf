"""Hugging Face causal language models on the ring, through transformers' public attention and mask interfaces."""

from collections.abc import Iterator
from dataclasses import fields
from itertools import count
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ringspan.core.names import (
    BatchLayoutName,
    CheckpointName,
    ChunkTokens,
    CommDtypeName,
    ExpertSlices,
    IndexLossName,
    KernelName,
    OffloadName,
)
from ringspan.core.step_config import StepConfig
from ringspan.torch.generate.model import RingGenerator
from ringspan.torch.mechanisms.every import MECHANISMS
from ringspan.torch.model.adapters import adapter_facts, base_of, put_on_ring
from ringspan.torch.model.attention.function import register_attention
from ringspan.torch.model.attention.latents import (
    latent_modules,
    send_latents,
)
from ringspan.torch.model.attention.own import take_over_attention
from ringspan.torch.model.config_changes import copy_configs, deciding_fields
from ringspan.torch.model.consistency.calls import Call, check_call, meeting
from ringspan.torch.model.consistency.fixed import (
    Structure,
    note_buffers,
    note_data,
    refuse_copy,
    refuse_own_calls,
)
from ringspan.torch.model.consistency.loop_watch import (
    in_call,
    say_at_the_end,
    watch_loop,
)
from ringspan.torch.model.consistency.optimizers import watch_optimizers
from ringspan.torch.model.consistency.weights import (
    check_finite,
    describe_weights,
    share_weights,
)
from ringspan.torch.model.layers.blockwise.blocks import run_in_blocks
from ringspan.torch.model.layers.blockwise.head import kind_of_head
from ringspan.torch.model.layers.compiled import compile_layers
from ringspan.torch.model.layers.decoder import layer_kinds
from ringspan.torch.model.layers.embedding import sum_embedding_gradients
from ringspan.torch.model.layers.modules import mix_in, own_config, seen_as
from ringspan.torch.model.layers.numbering import number_tokens, skipped_token
from ringspan.torch.model.layers.positions import note_learned_positions
from ringspan.torch.model.layers.rope import chunk_rotary_tables
from ringspan.torch.model.layers.router_loss import record_routers
from ringspan.torch.model.memory.carrying import carry_passes
from ringspan.torch.model.memory.checkpointing import checkpoint_layers
from ringspan.torch.model.memory.sharding import shard_weights
from ringspan.torch.model.memory.shared_blocks import join_shared_blocks
from ringspan.torch.model.memory.slices import slice_experts
from ringspan.torch.model.tasks.causal_lm import RingCausalLM
from ringspan.torch.model.tasks.classifier import RingClassifier
from ringspan.torch.model.tasks.hidden_states import RingDecoder, check_inner_call
from ringspan.torch.model.tensor_parallel.split import split_model
from ringspan.torch.model.weights.loading import fill_shards, set_aside, sources_in
from ringspan.torch.model.weights.packed import settle_packed
from ringspan.torch.parts import Parts, check_parts, compute_dtype_of
from ringspan.torch.runtime.foreign_mesh import ring_mesh
from ringspan.torch.runtime.mesh import tensor_axis
from ringspan.torch.runtime.seams import check_torch

# The number of models that each mesh has been given, equal on all of its ranks.
_numbers: Final[dict[tuple[int, ...], Iterator[int]]] = {}


def parallelize(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    layout: BatchLayoutName = "zigzag",
    route: str = "ring",
    comm_dtype: CommDtypeName = "exact",
    kernel: KernelName = "auto",
    checkpoint: CheckpointName = "attention",
    layers_per_checkpoint: int = 1,
    folds: int = 1,
    loss_chunk_tokens: int = 1024,
    loss_chunk_vocabulary: int | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    index_loss: IndexLossName = "none",
    feedforward_chunk_tokens: ChunkTokens = "auto",
    norm_chunk_tokens: ChunkTokens = "auto",
    expert_slices: ExpertSlices = 1,
    offload: OffloadName = "none",
    compute_dtype: torch.dtype | None = None,
    compile: bool | str = False,
    watchdog: bool = False,
) -> PreTrainedModel:
    """Put a decoder-only causal LM of transformers on the ring, in place; feed it what ``shard_batch`` returns.

    Attention becomes ``ring_attention`` over ``mesh["ring"]``; parameters, gradients and optimizer state are sharded
    over it and replicated over ``mesh["replicate"]`` (FSDP2); gradients are summed over all ranks, in float32. An axis
    ``tp`` first splits heads, feed-forward and vocabulary (``ringspan.torch.model.tensor_parallel.split``).
    ``model(**batch).loss`` is the whole batch's on every rank, summed over all targets and divided by their count, or
    by ``num_items_in_batch`` for gradient accumulation; without labels, ``model(**batch)`` gives the local logits (B,
    T, V).

    Other models leave the loss to you: sequence classifiers (``AutoModelForSequenceClassification``) give logits (B,
    labels) on every rank, token classifiers the local tokens'. A decoder without a head (``AutoModel``), alone or in a
    ``PreTrainedModel`` of yours that otherwise treats each token by itself, takes ``shard_features``' output as
    ``inputs_embeds`` and gives local hidden states, see ``global_sum``. A PEFT model (``get_peft_model``) comes back
    wrapped, and saves its adapter. Later changes that are not possible raise
    (``ringspan.torch.model.consistency.fixed``).

    Args:
        model: any model whose attention goes through transformers' AttentionInterface, on any device; its shards move
            layer by layer. One larger than a host: ``from_pretrained``. One on the meta device gets its weights
            afterwards (``to_empty``, then ``set_model_state_dict`` of ``torch.distributed``).
        mesh: from ``init_mesh``, or with torchtitan's and accelerate's names (``dp_replicate``, ``cp`` or ``sp``,
            ``tp``); see ``map_mesh`` for others.
        layout: as for ``shard_batch``; ``balanced`` makes one for each batch's documents (``ringspan.balanced``).
        route: how keys and values get to other ranks, see ``ring_attention``.
        comm_dtype: their dtype in messages, see ``ring_attention``; ``exact`` changes nothing.
        kernel: what computes attention on each device, see ``ring_attention``.
        checkpoint: what layers keep for backward: ``full`` the input, ``attention`` also attention, ``none`` all.
        layers_per_checkpoint: consecutive layers that keep only the first one's input.
        folds: parts of each sequence that are computed one after the other, so that activations of one exist at once;
            ``shard_batch`` needs the same. See ``ringspan.torch.mechanisms.folds.passes``.
        loss_chunk_tokens: tokens whose logits exist at once.
        loss_chunk_vocabulary: vocabulary entries whose logits exist at once, all if None.
        z_loss: factor on the squared log-sum-exp of the logits.
        label_smoothing: share of each target that is spread over the vocabulary.
        index_loss: trains the index of layers that choose their keys (DeepSeek-V3.2): ``sparse`` compares it with
            attention over the keys it chose, ``dense`` with attention to all keys, which then replaces its choice;
            ``none`` leaves it without gradients. ``ringspan.torch.mechanisms.chosen_keys.index_loss``.
        feedforward_chunk_tokens: tokens that a feed-forward computes at once; 0 for all. ``auto`` takes 4,096 if nearly
            free: in checkpointed layers whose feed-forward can be cut and comes last.
        norm_chunk_tokens: tokens that a norm computes at once; 0 for all. ``auto`` takes 4,096 if layers are
            checkpointed, for 16,384 local tokens and more.
        expert_slices: parts that a layer's experts are gathered in, one computing while the next is on its way, so
            that a third as many weights are in memory with 3; ``auto`` takes the fewest of 2 GiB at most. See
            ``ringspan.torch.model.memory.slices``.
        offload: ``activations`` wait for backward in host memory (CUDA) or memory-mapped files (CPU).
        compute_dtype: dtype that layers compute in (parameters keep theirs); the parameters' own when None.
        compile: make each layer a torch.compile program, when it first runs; a name chooses another backend than
            ``inductor``. Not with ``offload``, ``layers_per_checkpoint`` or blocks of feed-forwards and norms.
        watchdog: connect the ranks by a port of their own, and end this process, naming the awaited rank, when a rank
            dies or misses a call until the process group's time-out. Otherwise the wait ends as torch ends it, and a
            line names the missing ranks.

    Raises:
        UnsupportedError: the model or its config asks for something that would not be exact.
        ConfigError, LayoutError: an unknown or conflicting option; a weight that is NaN or infinite (-inf in a vector
            is a mask).
        PeerMismatch: the ranks were given different models or options.

    Each is raised on every rank, and leaves the model as it was. If weights differ, all ranks get the first rank's.
    """
    is_dtype = isinstance(compute_dtype, torch.dtype)
    # A value that is not a dtype is shown as it is, for the error.
    dtype = (
        str(compute_dtype).removeprefix("torch.") if is_dtype else repr(compute_dtype)
    )
    config = StepConfig(
        layout=layout,
        route=route,
        comm_dtype=comm_dtype,
        kernel=kernel,
        checkpoint=checkpoint,
        layers_per_checkpoint=layers_per_checkpoint,
        folds=folds,
        loss_chunk_tokens=loss_chunk_tokens,
        loss_chunk_vocabulary=loss_chunk_vocabulary,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        index_loss=index_loss,
        feedforward_chunk_tokens=feedforward_chunk_tokens,
        norm_chunk_tokens=norm_chunk_tokens,
        expert_slices=expert_slices,
        offload=offload,
        compute_dtype=None if compute_dtype is None else dtype,
        compile=compile,
        watchdog=watchdog,
    )
    return put_on_mesh(model, mesh, config)


def put_on_mesh(
    model: PreTrainedModel, mesh: DeviceMesh, config: StepConfig
) -> PreTrainedModel:
    """Run ``parallelize`` with its options in one value."""
    check_torch()
    mesh = ring_mesh(mesh)
    given = model
    model, parts = _agreed(given, mesh, config)
    share_weights(model, mesh)
    # From here on the model changes, and nothing raises any more.
    slices = slice_experts(parts.slices, config.feedforward_chunk_tokens)
    own_config(model)
    sources = sources_in(model)
    view, shared, layers = (
        parts.view,
        join_shared_blocks(model),
        [*parts.view.layers.values()],
    )
    units: list[nn.Module] = []
    for each in MECHANISMS:
        units += each.prepare(view, config, mesh)
    _attend_over_ring(parts, mesh, config)
    _prepare_layers(parts, config)
    _call_over_ring(parts, mesh, config)
    if (tp := tensor_axis(mesh)) is not None:
        split_model(model, tp)
    recorder = None if parts.router is None else parts.router.recorder
    for modules, chunk_tokens, option, from_tokens in parts.in_blocks:
        run_in_blocks(
            modules, chunk_tokens, option, from_tokens=from_tokens, recorder=recorder
        )
    shard_weights(
        model, [*shared, *layers, *units], slices, mesh, compute_dtype_of(config)
    )
    if config.compile is not False:
        compile_layers(
            view.decoder, layers, layer_kinds(view.decoder.config), config.compile
        )
    if isinstance(model, RingCausalLM):
        refuse_own_calls(model, model.ring_decoder)
    watch_optimizers(model)
    say_at_the_end()
    if config.watchdog:
        watch_loop(mesh)
    if sources:
        with in_call("loading the weights"):
            error = fill_shards(model, sources)
            check_call(mesh, Call("the end of loading the weights", error=error))
    _note_what_stays(model, layers, mesh)
    if given is not model:
        put_on_ring(given)
    # accelerate's own mark of a model that it must not wrap
    vars(given)["_is_accelerate_prepared"] = True
    return given


def _agreed(
    given: PreTrainedModel, mesh: DeviceMesh, config: StepConfig
) -> tuple[PreTrainedModel, Parts]:
    """Return the model without its PEFT wrapper, and its parts, after all ranks agree on model and options.

    Any error of a check is raised on all ranks, before the model is changed.
    """
    with meeting(mesh, "parallelize") as met:
        model = base_of(given)
        set_aside(model)
        settle_packed(model)
        check_finite(model, mesh)
        parts = check_parts(model, mesh, config)
        facts = {
            field.name: str(getattr(config, field.name)) for field in fields(StepConfig)
        }
        facts |= describe_weights(model)
        facts |= {
            f"config.{name}": str(value)
            for name, value in deciding_fields(model.config).items()
        }
        facts |= adapter_facts(given)
        facts["family"] = parts.view.family.name
        met.alike = {"model": type(model).__name__} | facts
    return model, parts


def _attend_over_ring(parts: Parts, mesh: DeviceMesh, config: StepConfig) -> None:
    """Make the decoder's attention call the ring, through the implementation registered with transformers.

    Layers with latents or with an attention of their own are prepared first.
    """
    decoder, own = cast("Any", parts.view.decoder), parts.view.own_attention
    family = parts.view.family
    kinds = layer_kinds(decoder.config)
    ring = mesh.get_group("ring")
    attending = (each.attends(parts.view, config) for each in MECHANISMS)
    implementation = register_attention(
        type(decoder).__name__,
        ring,
        kinds,
        config,
        attends=next((each for each in attending if each is not None), None),
        family=family,
    )
    send_latents(latent_modules(decoder, mesh, config), config)
    if own:  # transformers does not set one for these
        decoder.config._attn_implementation = implementation
        take_over_attention(own, implementation)
    else:
        decoder.set_attn_implementation(implementation)
    number_tokens(decoder)
    attention: Any
    for attention in decoder.modules():
        if family.query_scale is not None:
            # The module would count local tokens; ``attend`` scales by global positions.
            attention.ring_query_scale = family.query_scale(attention)


def _prepare_layers(parts: Parts, config: StepConfig) -> None:
    view, decoder = parts.view, parts.view.decoder
    if parts.router is not None:
        record_routers(decoder, parts.router)
    checkpoint_layers(
        view, config.checkpoint, config.offload, config.layers_per_checkpoint
    )
    chunk_rotary_tables(decoder)
    note_learned_positions(decoder)
    if config.compile is False:
        carry_passes(
            [*view.layers.values()],
            keeps=bool(view.stateful) and config.checkpoint == "attention",
        )
    sum_embedding_gradients(decoder)


def _call_over_ring(parts: Parts, mesh: DeviceMesh, config: StepConfig) -> None:
    """Replace the model's forward by the ring's for its task, and give it what that needs: mesh, options and parts."""
    view, model, decoder = parts.view, parts.view.model, parts.view.decoder
    about: dict[str, Any] = {
        "ring_mesh": mesh,
        "ring_axis": mesh["ring"],
        "ring_layout": config.layout,
        "ring_folds": config.folds,
        "ring_step": config,
        "ring_decoder": next(
            name for name, module in model.named_modules() if module is decoder
        ),
        "ring_configs": copy_configs((model.config, decoder.config)),
        "ring_mechanisms": MECHANISMS,
        # Mechanisms with keys of their own act on the batches that have them.
        "ring_found": {
            each.name: parts.mechanisms[each.name]
            for each in MECHANISMS
            if not each.keys
        },
    }
    for each in MECHANISMS:
        about |= each.attributes(view)
    if parts.head is None and not view.is_classifier:
        mix_in(model, RingDecoder, **about)
        if decoder is not model:
            check_inner_call(model, decoder)
        return
    if about["ring_media"] is not None:
        # ``generate`` reads from the signature which images a model takes, and whether it takes embeddings, which
        # ``generate`` would then compute itself.
        about["forward"] = seen_as(
            type(model).forward, RingGenerator.forward, without="mm_encoder_outputs"
        )
    mix_in(
        model,
        RingClassifier if parts.head is None else RingGenerator,
        **about,
        ring_loss=parts.loss,
        ring_vocabularies=parts.vocabularies,
        ring_skipped=skipped_token(decoder),
        ring_head=None if parts.head is None else kind_of_head(parts.head),
        ring_head_parts=parts.head_parts,
        ring_compiled=config.compile is not False,
        ring_router=parts.router,
    )


def _note_what_stays(model: Any, layers: list[nn.Module], mesh: DeviceMesh) -> None:
    note_data(model)
    note_buffers(model, layers)
    kind: Any = type(model)
    kind.__deepcopy__ = refuse_copy
    # Set on the model, as ``mix_in`` does, since torch keeps the class forever.
    vars(model).update(
        ring_structure=Structure(model),
        ring_loss_function=model.loss_function,
        ring_number=_next_number(mesh),
    )


def _next_number(mesh: DeviceMesh) -> str:
    ranks = tuple(mesh.mesh.flatten().tolist())
    return f"number {next(_numbers.setdefault(ranks, count(1)))}"
