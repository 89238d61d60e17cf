"""Parts of a model that ``parallelize`` may change, found before any change; unsupported models raise here."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ringspan.core.arguments import FREE_CHUNK_TOKENS, FREE_NORM_TOKENS
from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.mechanisms import refuse_pairs
from ringspan.core.messages.numbers import check_whole
from ringspan.core.step_config import StepConfig
from ringspan.torch.data.loss_blocks import LossOptions
from ringspan.torch.mechanisms.every import MECHANISMS
from ringspan.torch.model.attention.own import refuse_compiled
from ringspan.torch.model.layers.blockwise.feedforward import (
    beside_slices,
    find_feedforwards,
    find_norms,
    free_feedforwards,
)
from ringspan.torch.model.layers.blockwise.head import (
    joined,
    refuse_blocks_of_vocabulary,
    vocabularies,
)
from ringspan.torch.model.layers.compiled import check_compile
from ringspan.torch.model.layers.router_loss import (
    RouterLoss,
    find_router_loss,
    no_router_loss,
)
from ringspan.torch.model.layers.view import ModelView
from ringspan.torch.model.memory.checkpointing import check_checkpointing
from ringspan.torch.model.memory.slices import (
    FusedExperts,
    choose_slices,
)
from ringspan.torch.model.splittable import refuse_cast
from ringspan.torch.model.support import (
    FoundHead,
    refuse_kernel,
    refuse_route,
    refuse_unsupported,
    say_shifted,
)
from ringspan.torch.model.tasks.causal_lm import RingCausalLM
from ringspan.torch.model.tasks.classifier import refuse_classifier
from ringspan.torch.model.tasks.hidden_states import RingDecoder, refuse_headless
from ringspan.torch.model.tensor_parallel.split import refuse_split
from ringspan.torch.model.view import view_of
from ringspan.torch.runtime.mesh import tensor_axis


class InBlocks(NamedTuple):
    modules: list[nn.Module]
    chunk_tokens: int
    option: str  # the option that sets it, for errors
    from_tokens: int = 0  # fewer local tokens than this are not cut


class Parts(NamedTuple):
    view: ModelView
    in_blocks: list[InBlocks]
    # What model and options have of each mechanism, by its name (``Mechanism.found_in``).
    mechanisms: dict[str, str]
    vocabularies: tuple[int, int] = (0, 0)
    loss: LossOptions = LossOptions()
    head: nn.Module | None = None  # None if the model ends in hidden states
    head_parts: tuple[
        str, ...
    ] = ()  # the head's modules, if it is more than the output embedding
    router: RouterLoss | None = None
    # Experts that are gathered in slices, and in how many.
    slices: Mapping[FusedExperts, int] = MappingProxyType({})


def check_parts(model: PreTrainedModel, mesh: DeviceMesh, config: StepConfig) -> Parts:
    """Return the parts of a model that ``parallelize`` changes.

    Raise for anything that it cannot do, changing nothing.
    """
    if isinstance(model, (RingCausalLM, RingDecoder)):
        raise UnsupportedError(
            f"{type(model).__name__.removeprefix('FSDP')} is on a ring already; call this once"
        )
    view, found = view_of(model), FoundHead()
    if view.is_classifier:
        refuse_classifier(view)
    elif view.head is None:
        refuse_headless(view)
    else:
        found = refuse_unsupported(view)
    if view.head is None:
        _refuse_without_head(view, mesh, config)
    mechanisms = check_options(view, mesh, config)
    slices = choose_slices(view, config.expert_slices, compute_dtype_of(config))
    in_blocks = list(_in_blocks(view, mesh, config))
    if slices:
        experts, size = (
            {each.module for each in slices},
            view.decoder.config.hidden_size,
        )
        in_blocks = [
            each._replace(modules=beside_slices(each.modules, experts, size))
            for each in in_blocks
        ]
    parts = Parts(view, in_blocks, mechanisms, slices=slices)
    if view.head is None:
        return (
            parts._replace(vocabularies=vocabularies(model))
            if view.is_classifier
            else parts
        )
    return _with_head(view.head, mesh, config, parts, found)


def _refuse_without_head(view: ModelView, mesh: DeviceMesh, config: StepConfig) -> None:
    name = view.name
    if config.compile is not False:
        raise UnsupportedError(
            f"compile={config.compile!r}: {name} has no head; leave it out"
        )
    if config.layout == "balanced" and not view.is_classifier:
        raise UnsupportedError(
            f"layout 'balanced' is made for documents, of which {name}, without a head, is not told; use zigzag"
        )
    if tensor_axis(mesh) is not None:
        raise UnsupportedError(
            f"{name} has no head, whose weights tp does not split yet; use tp=1"
        )
    for option in ("label_smoothing", "z_loss"):
        if value := getattr(config, option):
            raise UnsupportedError(
                f"{option}={value} is added to a loss of next tokens, of which {name} predicts none; leave it out"
            )


def check_options(
    view: ModelView, mesh: DeviceMesh, config: StepConfig
) -> dict[str, str]:
    """Raise for options that do not fit a model or mesh; return what these have of each mechanism, by its name.

    The model may be without weights.
    """
    model, decoder = view.model, view.decoder
    axis, ring = tensor_axis(mesh), mesh.get_group("ring").size()
    tp = 1 if axis is None else axis.size()
    if axis is not None:
        refuse_split(model, tp)
    batch_layout(config.layout, ring, ring)
    if config.layout == "balanced" and "ulysses" in config.route:
        raise UnsupportedError(
            f"layout 'balanced' has no Ulysses groups for route {config.route!r}; use another one, such as all-gather"
        )
    for each in MECHANISMS:
        each.refuse(view, config, mesh)
    found = {each.name: each.found_in(view, config) for each in MECHANISMS}
    refuse_pairs(found, view.name)
    compute_dtype = compute_dtype_of(config)
    refuse_cast(model, compute_dtype)
    refuse_route(decoder.config, ring, config, tp)
    refuse_kernel(decoder, config.kernel, compute_dtype, mesh["ring"])
    layered = decoder if view.head is None else model
    check_checkpointing(
        layered, config.checkpoint, config.offload, config.layers_per_checkpoint
    )
    refuse_compiled(view, config.compile)
    check_compile(decoder, config)
    return found


def _in_blocks(
    view: ModelView, mesh: DeviceMesh, config: StepConfig
) -> Iterator[InBlocks]:
    """Yield feed-forwards and norms that run in blocks, tried out before attention changes."""
    if config.compile is not False:  # blocks would break its programs
        return
    option, is_checkpointed = "feedforward_chunk_tokens", config.checkpoint != "none"
    if config.feedforward_chunk_tokens == "auto":
        feedforwards = free_feedforwards(
            view, checkpointed=is_checkpointed, logs=_is_first(mesh)
        )
        # A single block would save nothing: the layer around it is recomputed too.
        yield InBlocks(feedforwards, FREE_CHUNK_TOKENS, option, FREE_CHUNK_TOKENS + 1)
    elif config.feedforward_chunk_tokens != 0:
        check_whole(option, config.feedforward_chunk_tokens, 0)
        yield InBlocks(find_feedforwards(view), config.feedforward_chunk_tokens, option)
    option = "norm_chunk_tokens"
    if config.norm_chunk_tokens == "auto":
        yield InBlocks(
            find_norms(view.decoder) if is_checkpointed else [],
            FREE_CHUNK_TOKENS,
            option,
            FREE_NORM_TOKENS,
        )
    elif config.norm_chunk_tokens != 0:
        check_whole(option, config.norm_chunk_tokens, 0)
        yield InBlocks(find_norms(view.decoder), config.norm_chunk_tokens, option)


def _with_head(
    head: nn.Module,
    mesh: DeviceMesh,
    config: StepConfig,
    parts: Parts,
    found: FoundHead,
) -> Parts:
    """Return the parts with the head's: its modules, vocabularies, loss options and router loss."""
    model = parts.view.model
    if not found.shifts and _is_first(mesh):
        say_shifted(model)
    if found.parts:
        head = joined([model.get_submodule(name) for name in found.parts])
    refuse_blocks_of_vocabulary(head, config.loss_chunk_vocabulary)
    loss = LossOptions(
        chunk_tokens=config.loss_chunk_tokens,
        chunk_vocabulary=config.loss_chunk_vocabulary,
        z_loss=config.z_loss,
        label_smoothing=config.label_smoothing,
        logit_scale=found.scale,
        softcap=found.softcap,
    )
    router = find_router_loss(parts.view)
    if router is None and getattr(
        parts.view.decoder.config, "output_router_logits", False
    ):
        raise no_router_loss(parts.view.name)
    return parts._replace(
        vocabularies=vocabularies(model),
        loss=loss,
        head=head,
        head_parts=found.parts,
        router=router,
    )


def _is_first(mesh: DeviceMesh) -> bool:
    return mesh.get_rank() == int(mesh.mesh.min())


def compute_dtype_of(config: StepConfig) -> torch.dtype | None:
    """Return the dtype that layers compute in, or None if it is the parameters' own.

    ConfigError if it is not a float dtype.
    """
    if config.compute_dtype is None:
        return None
    dtype = getattr(torch, config.compute_dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        shown = (
            f"torch.{config.compute_dtype}"
            if isinstance(dtype, torch.dtype)
            else config.compute_dtype
        )
        raise ConfigError(
            f"compute_dtype must be a dtype such as torch.bfloat16, or None, got {shown}"
        )
    return dtype
