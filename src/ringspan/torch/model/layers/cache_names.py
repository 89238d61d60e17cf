"""Names of a cache in callers, modules and releases of transformers."""

import inspect
from dataclasses import fields
from typing import Any, Final

from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from ringspan.torch.model.layers.modules import forward_of

OURS: Final = "past_key_values"
# transformers says "cache" from 5.24 on; Mamba's classes said "cache_params" before.
_OTHERS: Final = (
    "cache",
    "cache_params",
)
NAMES: Final = (OURS, *_OTHERS)

OF_GENERATE: Final = (
    "cache"
    if "cache" in {field.name for field in fields(CausalLMOutputWithPast)}
    else OURS
)
"""Name under which ``generate`` of the installed transformers passes and reads the cache."""


def given_cache(arguments: dict[str, Any]) -> Any:
    return next(
        (cache for name in NAMES if (cache := arguments.get(name)) is not None), None
    )


def name_ours(arguments: dict[str, Any]) -> None:
    for name in _OTHERS:
        if (cache := arguments.pop(name, None)) is not None:
            arguments.setdefault(OURS, cache)


def cache_name(module: nn.Module) -> str | None:
    taken = inspect.signature(forward_of(module)).parameters
    return next((name for name in (*_OTHERS, OURS) if name in taken), None)
