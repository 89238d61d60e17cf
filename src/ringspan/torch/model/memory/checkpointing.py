"""Activation checkpointing: what a layer keeps for backward and what it recomputes."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ringspan.core.costs import LayerSizes, saved_bytes
from ringspan.core.errors import ConfigError
from ringspan.core.names import (
    CHECKPOINT_NAMES,
    CheckpointName,
    OffloadName,
    checkpoint_name,
    offload_name,
)
from ringspan.core.schedule.choice import check_segments, segment_sizes
from ringspan.torch.engine.attention import traced  # noqa: F401 - it registers the operator named below
from ringspan.torch.model.layers.decoder import head_counts, head_sizes
from ringspan.torch.model.layers.modules import Mixin, mix_in
from ringspan.torch.model.layers.view import ModelView
from ringspan.torch.model.memory.offload import Store
from ringspan.torch.model.memory.segments import Segments

_LAYER: Final = torch.ops.ringspan.layer_attention.default


def layer_sizes(config: PreTrainedConfig, tp: int = 1) -> LayerSizes:
    """Return the largest layer's sizes, or one of ``tp`` ranks' share; extra norms beyond Llama's keep more."""
    heads, kv_heads = (count // tp for count in max(head_counts(config)))
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return LayerSizes(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=max(head_sizes(config)),
        intermediate=intermediate // tp,
    )


def choose_checkpoint(
    config: PreTrainedConfig, tokens: int, budget_bytes: int, dtype: torch.dtype, *, tp: int = 1,
    feedforward_in_chunks: bool = False, layers_per_checkpoint: int | None = None,
) -> tuple[CheckpointName, int]:  # fmt: skip
    """Return the policy and ``layers_per_checkpoint`` that fit these tokens' activations into a byte budget.

    The first that fits in an order of growing recomputation; ConfigError with the needed bytes if not even the last
    does.
    """
    # The order: none, then attention and full, each with ever more layers that share an input, or the given number.
    needed, sharing = 0, 1
    layers, an_input, sizes = (
        config.num_hidden_layers,
        dtype.itemsize * config.hidden_size,
        layer_sizes(config, tp),
    )
    segments = (
        (layers_per_checkpoint,) if layers_per_checkpoint else segment_sizes(layers)
    )
    for policy in CHECKPOINT_NAMES:
        for sharing in (1,) if policy == "none" else segments:
            saved = saved_bytes(
                sizes,
                dtype.itemsize,
                policy,
                layers=layers,
                layers_per_checkpoint=sharing,
                feedforward_in_chunks=feedforward_in_chunks,
            )
            # In backward, a segment's other inputs exist too.
            needed = tokens * (saved + (sharing - 1) * an_input)
            if needed <= budget_bytes:
                return policy, sharing
    raise ConfigError(
        f"activations of {tokens:,} tokens per rank take {needed:,} bytes with checkpoint='full' and {sharing} layers "
        f"per checkpoint, the budget is {budget_bytes:,}; use a larger ring, a larger layers_per_checkpoint where "
        "it is given, or offload='activations'"
    )


def check_checkpointing(
    model: PreTrainedModel, policy: str, offload: str, layers_per_checkpoint: int
) -> None:
    """Raise ConfigError for an unknown policy, no checkpointing, or nothing to offload or to segment."""
    if offload_name(offload) != "none" and checkpoint_name(policy) == "none":
        raise ConfigError(
            f"offload={offload!r} moves what checkpointing keeps; use checkpoint='attention' or 'full'"
        )
    check_segments(checkpoint_name(policy), layers_per_checkpoint)
    if policy != "none" and not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(model).__name__} has no activation checkpointing; use checkpoint='none'"
        )
    if policy == "none" and any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    ):
        # The name since transformers 5.23.
        has_new_name = hasattr(model, "activation_checkpointing_disable")
        turn_off = (
            "activation_checkpointing_disable"
            if has_new_name
            else "gradient_checkpointing_disable"
        )
        raise ConfigError(
            f"checkpoint='none', but the model's own checkpointing is on; call model.{turn_off}() before, or use "
            "checkpoint='full'"
        )


def checkpoint_layers(
    view: ModelView,
    policy: CheckpointName,
    offload: OffloadName = "none",
    layers_per_checkpoint: int = 1,
) -> None:
    """Checkpoint every decoder layer of a Hugging Face model, by checked options.

    ``none`` keeps everything, ``full`` a layer's input; ``attention`` also the ring's result and log-sum-exp, so that
    the ring forward never runs again. With ``offload="activations"`` they wait in host memory (CUDA) or memory-mapped
    files (CPU). Of ``layers_per_checkpoint`` consecutive layers only the first keeps its input.
    """
    if policy == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if policy == "attention":
        options["context_fn"] = partial(
            create_selective_checkpoint_contexts, _keep_layer_attention
        )
    decoder, layers = view.decoder, [*view.layers.values()]
    checkpoint_all(decoder, options)
    # A part of a layer is recomputed with its layer, not by a checkpoint within it.
    for module in decoder.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in layers:
            module.gradient_checkpointing = False
    store = Store() if offload == "activations" else Store(min_bytes=sys.maxsize)
    segments = Segments(
        layers_per_checkpoint, store, keeps_attention=policy == "attention"
    )
    # transformers gives each layer a function that checkpoints it; ours lets several layers keep one input. Layers that
    # are checkpointed singly share one function, since torch.compile would make a program for each.
    shared = partial(_checkpoint, partial(segments.checkpoint, decoder), options)
    is_shared = offload == "none" and layers_per_checkpoint == 1
    layer: Any
    for layer in layers:
        layer._gradient_checkpointing_func = (
            shared if is_shared else partial(segments.checkpoint, layer)
        )
    mix_in(decoder, _InSegments, activation_segments=segments)


def _checkpoint(
    checkpoint: Callable[..., Any],
    in_programs: dict[str, Any],
    function: Callable[..., Any],
    *args: object,
) -> object:
    """Checkpoint a layer; under torch.compile by torch's own checkpoint, which can keep an operator's result."""
    if torch.compiler.is_compiling():
        return torch_checkpoint(function, *args, **in_programs)
    return checkpoint(function, *args)


def checkpoint_all(model: PreTrainedModel, options: dict[str, Any]) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name before transformers 5.2x
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # transformers lets embeddings require gradients, for reentrant checkpointing. With that, a frozen model would train
    # nothing without an error, and a frozen embedding would be differentiated.
    model.disable_input_require_grads()


class _InSegments(Mixin):
    activation_segments: Segments

    def forward(self, *args: object, **kwargs: object) -> object:
        with self.activation_segments.forward_pass():
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def _keep_layer_attention(
    ctx: object, operator: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operator == _LAYER
        else CheckpointPolicy.PREFER_RECOMPUTE
    )
