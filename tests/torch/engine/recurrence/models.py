"""Tiny models with states and convolutions, in float32 and, all of what they compute, in float64."""

import sys
from functools import lru_cache
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ringspan.proof.float64 import in_float64
from tests.every_model.hybrids import hybrid_config


@lru_cache
def module_of(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the module of a model has: as it is, or such that it computes in float64."""
    plain = class_of(kind)
    return (
        vars(sys.modules[plain.__module__])
        if dtype != torch.float64
        else in_float64(plain)
    )


def class_of(kind: str) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(hybrid_config(kind))]


def build(kind: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A model with the same random weights in either dtype."""
    settings = hybrid_config(kind, **changes)
    torch.manual_seed(0)
    model = module_of(kind, dtype)[class_of(kind).__name__](settings).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # decays from near 0 to near 1
            noise = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
            if name.endswith(("A_log", "dt_bias", "dt_proj.bias", "dt_proj_bias")):
                parameter.copy_(noise * 1.5 - 0.5)
            elif parameter.ndim == 1 and "norm" in name:
                parameter.copy_(1 + noise * 0.1)
            else:
                parameter.copy_(noise * 0.15)
    for module in model.modules():
        if hasattr(module, "tid2eid"):  # which experts a token goes to
            module.tid2eid.copy_((torch.arange(97)[:, None] + torch.arange(2)) % 4)
        if hasattr(module, "decay_factors"):  # made in float32 when the model was
            names = "query_decay", "key_decay", "diagonal_decay"
            for name, factors in zip(
                names, module.decay_factors(module.slope_rate), strict=True
            ):
                setattr(module, name, factors)
    return model.train()
