"""AdamW: what decays, and the place and bits of its moments."""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ringspan.core.errors import ConfigError
from ringspan.core.messages.extras import require
from ringspan.torch.memory.adamw import HostAdamW, RoundingAdamW
from ringspan.train.config.tables import OptimizerConfig


def build_optimizer(model: PreTrainedModel, settings: OptimizerConfig) -> torch.optim.Optimizer:
    groups, options = _decayed(model, settings), {"betas": settings.betas, "eps": settings.eps}
    if settings.name != "adamw":
        return _of_bitsandbytes(groups, options, settings.name)
    if settings.state != "float32":
        return _low_bit(groups, options, settings)
    if settings.on_host:
        return HostAdamW(groups, masters=settings.rounding == "master", **options)
    if settings.rounding == "stochastic":
        return RoundingAdamW(groups, **options)
    return torch.optim.AdamW(groups, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the next step's rate, which some optimizers hold in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _of_bitsandbytes(groups: list[dict[str, Any]], options: dict[str, Any], name: str) -> torch.optim.Optimizer:
    require(f'optimizer.name = "{name}"', "bitsandbytes")
    optim: Any = importlib.import_module("bitsandbytes.optim")
    if name == "lion_8bit":
        return optim.Lion8bit(groups, betas=options["betas"])
    kinds = {"adamw_8bit": optim.AdamW8bit, "paged_adamw": optim.PagedAdamW, "paged_adamw_8bit": optim.PagedAdamW8bit}
    return kinds[name](groups, **options)


def _low_bit(groups: list[dict[str, Any]], options: dict[str, Any], settings: OptimizerConfig) -> torch.optim.Optimizer:
    if importlib.util.find_spec("torchao") is not None:
        from torchao.optim import AdamW4bit, AdamW8bit  # pyright: ignore[reportMissingImports]

        kind = AdamW8bit if settings.state == "8bit" else AdamW4bit
        return kind(groups, bf16_stochastic_round=settings.rounding == "stochastic", **options)
    raise ConfigError(
        f'optimizer.state = "{settings.state}": needs torchao, which is not installed; pip install torchao, or set '
        'optimizer.state = "float32"'
    )


def _decayed(model: PreTrainedModel, settings: OptimizerConfig) -> list[dict[str, Any]]:
    decays: dict[bool, list[Tensor]] = {True: [], False: []}  # matrices do, vectors do not
    for p in model.parameters():
        if p.requires_grad:
            decays[p.ndim > 1].append(p)
    return [{"params": ps, "weight_decay": does * settings.weight_decay} for does, ps in decays.items() if ps]
