"""Refusals of trainer arguments that would not be exact, with the alternative."""

import logging
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import TrainingArguments

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.step_config import StepConfig
from ringspan.hf.config import RingConfig
from ringspan.torch.model.layers.view import RingModel

_TABLE: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_log: Final = logging.getLogger(__name__)
# The noise in benchmarks/results/log-prob-gap-cpu.json doubles or halves a weight over this many tokens.
_SUMMED_TOKENS: Final = 4650
_OPTIMIZERS: Final = frozenset[str](_TABLE["optimizers"].split())


def refuse_arguments(args: TrainingArguments, ring: RingConfig) -> None:
    """Raise UnsupportedError for the first ``TrainingArguments`` that a ring does not support, on all ranks."""
    for what, remedy in _unsupported(args, ring):
        raise UnsupportedError(f"{what} is not supported on a ring; {remedy}")


def refuse_vllm(args: TrainingArguments, ring: RingConfig) -> None:
    """Raise ConfigError where vLLM's options do not fit each other, on all ranks; warn of weights that vanish."""
    uses = getattr(args, "use_vllm", False)
    mode = getattr(args, "vllm_mode", None)
    if ring.vllm_weights_folder is not None and not (uses and mode == "server"):
        raise ConfigError(
            f"vllm_weights_folder={ring.vllm_weights_folder!r} is for use_vllm=True with vllm_mode='server'; leave it "
            "out, or set these"
        )
    sums = str(getattr(args, "vllm_importance_sampling_mode", "")).startswith("seq")
    corrects = getattr(args, "vllm_importance_sampling_correction", False)
    longest = getattr(args, "max_completion_length", None) or 0
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if uses and corrects and sums and longest > _SUMMED_TOKENS and is_first:
        _log.warning(
            "vllm_importance_sampling_mode=%r multiplies the ratios of up to %d tokens: in bfloat16 their noise alone "
            "makes the weight of a completion leave [0.5, 2] from %d tokens on; use 'token_truncate'",
            args.vllm_importance_sampling_mode,  # pyright: ignore[reportAttributeAccessIssue]
            longest,
            _SUMMED_TOKENS,
        )


def _unsupported(
    args: TrainingArguments, ring: RingConfig
) -> Iterator[tuple[str, str]]:
    """Yield (argument, remedy) for each training argument that a ring does not support.

    The table has the simple ones.
    """
    if getattr(args, "parallelism_config", None) is not None:
        yield (
            "parallelism_config, a second parallelism besides the ring,",
            "leave it out",
        )
    for name, remedy in _TABLE["arguments"].items():
        value = getattr(args, name, None)
        if value or (value is not None and name.startswith(("ddp_", "neftune_"))):
            yield name if name in ("deepspeed", "fsdp") else f"{name}={value!r}", remedy
    for is_asked, what, remedy in _conditional(args, ring):
        if is_asked:
            yield what, remedy
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer not in _OPTIMIZERS:
        remedy = (
            f"use one of {', '.join(sorted(_OPTIMIZERS))}, or optimizer_cls_and_kwargs with one that treats each "
            "number by itself"
        )
        yield f"optim={optimizer!r}", remedy


def _conditional(
    args: TrainingArguments, ring: RingConfig
) -> tuple[tuple[bool, str, str], ...]:
    """Return (whether it is asked for, argument, remedy) of what depends on more than one argument, or on a part."""
    loaders: Any = args.accelerator_config
    several = ring.replicas > 1
    in_order = getattr(args, "dataloader_in_order", True)
    checkpointing = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    return (
        (
            not args.average_tokens_across_devices and several,
            "average_tokens_across_devices=False with several replicas",
            "the loss would be the mean of the replicas' means, not that of one process; leave it True",
        ),
        (
            bool(loaders.dispatch_batches),
            "dispatch_batches=True",
            "leave it out: each rank reads its replica's batches",
        ),
        (
            not loaders.even_batches and several,
            "even_batches=False with several replicas",
            "one would wait for batches that others lack; leave it True",
        ),
        (
            args.dataloader_num_workers > 1 and not in_order,
            "dataloader_in_order=False",
            "each rank would get its workers' batches in another order; leave it True",
        ),
        (
            getattr(args, "train_sampling_strategy", None) == "batch_rebalance",
            "train_sampling_strategy='batch_rebalance'",
            "use 'group_by_length' or 'random'",
        ),
        (
            bool(checkpointing.get("selective")),
            "gradient_checkpointing_kwargs={'selective': True}",
            "RingConfig(checkpoint='attention') keeps attention's results",
        ),
        (
            ring.balance != "none" and bool(loaders.split_batches),
            f"balance={ring.balance!r} with split_batches=True",
            "leave one of the two out",
        ),
    )


def refuse_accelerator(accelerator: Accelerator) -> None:
    """Refuse a launcher's parallelism and precisions, and processes that accelerate does not know."""
    state = accelerator.state
    if dist.is_initialized() and state.num_processes != dist.get_world_size():
        raise ConfigError(
            f"accelerate counts {state.num_processes} of {dist.get_world_size()} processes; without an accelerator "
            "set TrainingArguments(use_cpu=True), or Accelerator(cpu=True), so that it sees the others"
        )
    for name in (
        "fsdp_plugin",
        "deepspeed_plugin",
        "megatron_lm_plugin",
        "parallelism_config",
    ):
        if getattr(state, name, None) is not None:
            raise UnsupportedError(
                f"accelerate was launched with {name}, a second parallelism besides the ring; launch without"
            )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UnsupportedError(
            f"mixed_precision={accelerator.mixed_precision!r}, given or of the launch, is not exact on a ring; use "
            "'bf16' or 'no'"
        )


def refuse_loss_options(model: RingModel) -> None:
    """Refuse additions to the ring's loss if TRL or ``compute_loss_func`` computes the loss."""
    if not (model.training and torch.is_grad_enabled()):
        return
    for name in ("label_smoothing", "z_loss", "index_loss"):
        if (value := getattr(model.ring_step, name)) != getattr(StepConfig, name):
            raise UnsupportedError(
                f"{name}={value} is added to the ring's own loss of next tokens, which this trainer does not use; "
                "leave it out of RingConfig"
            )


# Texts of errors that a ``compute_loss`` written for one process runs into, and their remedies.
_EXPLAINED: Final = {
    "'NoneType'": "a pass with labels gives the loss alone on a ring: take them out before, "
    "labels = inputs.pop('labels'), and the pass gives whole logits",
    "got mixed torch.Tensor and DTensor": "weights are shards on a ring: make what is computed of them whole, "
    "weight.square().sum().full_tensor()",
}


@contextmanager
def explained(method: FunctionType) -> Iterator[None]:
    """Turn failures of a user's loss that come from the ring into UnsupportedError with the needed change."""
    try:
        yield
    except (AttributeError, RuntimeError, TypeError) as error:
        remedy = next(
            (remedy for text, remedy in _EXPLAINED.items() if text in str(error)), None
        )
        if remedy is None or method.__module__.partition(".")[0] in (
            "ringspan",
            "transformers",
            "trl",
        ):
            raise
        raise UnsupportedError(
            f"{method.__qualname__}: {error}; {remedy} (docs/trainers.md)"
        ) from error


def refuse_callback(callback: object) -> None:
    """Raise UnsupportedError for a callback, or its class, that would behave differently on a ring."""
    kind = callback if isinstance(callback, type) else type(callback)
    for name in (
        base.__name__ for base in kind.__mro__ if base.__module__.startswith("trl.")
    ):
        if remedy := _TABLE["callbacks"].get(name):
            raise UnsupportedError(f"{name} is not supported on a ring; {remedy}")


def refuse_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    """Raise ConfigError for an optimizer created before the model went onto the ring, which holds the old weights."""
    if optimizer is None:
        return
    ours = {id(parameter) for parameter in model.parameters()}
    if any(
        id(parameter) not in ours
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        raise ConfigError(
            "optimizers=(...) holds weights from before the model went onto the ring; give "
            "optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}), or parallelize the model first"
        )
