"""A TOML file and `key=value` overrides -> a checked configuration."""

import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ringspan.core.errors import ConfigError
from ringspan.train.config.problems import explain, shown
from ringspan.train.config.tables import TrainConfig
from ringspan.train.config.toml import read_toml


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and apply overrides such as ``optimizer.learning_rate=1e-4``, the last one winning.

    The value of an override is parsed as TOML; what is not TOML is taken as a string, so ``model.dtype=bfloat16`` needs
    no quotes.

    Raises:
        ConfigError: one line that names the key, its value and the remedy.
    """
    values = read_toml(path)
    for override in overrides:
        _apply_override(values, override)
    config = parse_config(values)
    if config.model.init == "scratch":
        config.model.config_values()
    return config


def parse_config(values: Mapping[str, Any]) -> TrainConfig:
    """Check the nested values of a configuration; reads no file.

    Raises:
        ConfigError: one line that names the key, its value and the remedy.
    """
    try:
        return TrainConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(explain(error, TrainConfig)) from error


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *tables, name = (part.strip() for part in key.split("."))
    if not equals or not name or not all(tables):
        raise ConfigError(
            f"{shown(override)}: is not an override; write key=value, such as optimizer.learning_rate=1e-4"
        )
    table = values
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{shown(override)}: {part} = {shown(table)} is not a table, so it has no key {name}; set it"
            )
    table[name] = _override_value(text)


def _override_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    # More than one key: the text held a line break and went on as TOML. No key is a date, but run=2026-01-31 is a name.
    if parsed.keys() != {"value"} or isinstance(parsed["value"], date | time):
        return text.strip()
    return parsed["value"]
