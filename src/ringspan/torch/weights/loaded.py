"""Check that loaded weights match the model's config."""

from collections.abc import Mapping
from typing import Any

from ringspan.core.errors import ConfigError


def check_loaded(where: str, found: Mapping[str, Any]) -> None:
    """Raise ConfigError for missing or mismatched weights, which transformers would draw at random."""
    # ``found``: the loading info of ``from_pretrained(..., ignore_mismatched_sizes=True)``; ``where``: the user's call.
    remedy = "use the config.json that belongs to the weights"
    if found["mismatched_keys"]:
        name, here, wanted = min(found["mismatched_keys"])
        raise ConfigError(f"{where}: {name} is {list(here)} there, and {list(wanted)} in the model; {remedy}")
    if found["missing_keys"]:
        raise ConfigError(f"{where}: has no {first_of(found['missing_keys'])}; {remedy}")


def first_of(names: set[str]) -> str:
    return f"{min(names)} ({len(names)} weights in all)" if len(names) > 1 else min(names)
