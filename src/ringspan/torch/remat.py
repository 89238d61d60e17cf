"""Activation checkpointing: what a layer keeps for its backward pass and what it computes again."""

from functools import partial
from typing import Any, Final, Literal, cast, get_args

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from ringspan.core.errors import ConfigError

CheckpointName = Literal["none", "full", "attention"]
CHECKPOINT_NAMES: Final[tuple[str, ...]] = get_args(CheckpointName)


def checkpoint_name(name: str) -> CheckpointName:
    """``name`` as the name of a policy.

    Raises:
        ConfigError: there is no such policy.
    """
    if name not in CHECKPOINT_NAMES:
        raise ConfigError(f"unknown checkpoint policy {name!r}; choose one of {', '.join(CHECKPOINT_NAMES)}")
    return cast(CheckpointName, name)


def checkpoint_layers(model: PreTrainedModel, policy: CheckpointName) -> None:
    """Checkpoint every decoder layer of a Hugging Face model.

    ``none`` keeps everything; ``full`` keeps a layer's input and computes the layer again; ``attention`` also keeps the
    ring's result and log-sum-exp, so that the ring forward (its FLOPs and all of its communication) never runs again.

    Raises:
        ConfigError: an unknown policy, or a model without checkpointing.
    """
    if checkpoint_name(policy) == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"{type(model).__name__} has no activation checkpointing; use checkpoint='none'")
    options: dict[str, Any] = {"use_reentrant": False}
    if policy == "attention":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name before transformers 5.2x
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _keep_attention(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator == torch.ops.ringspan.ring_attention.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
