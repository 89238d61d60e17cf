"""A TOML file and `key=value` overrides -> a checked configuration."""

import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import read_small
from ringspan.core.messages.lines import one_line, refused
from ringspan.train.config.problems import explain, shown
from ringspan.train.config.tables import TrainConfig

_REMEDY: Final = (
    "; a line is a [table], one key = value or a # comment, and each stands once; strings need quotes, single ones "
    "around a \\"
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and overrides like ``optimizer.learning_rate=1e-4``; a value that is not TOML is text."""
    values = _read_toml(path)
    for override in overrides:
        apply_override(values, override)
    config = parse_config(values)
    if config.model.init == "scratch":
        config.model.config_values()
    return config


def parse_config(values: Mapping[str, Any]) -> TrainConfig:
    try:
        return TrainConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(explain(error, TrainConfig)) from error


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        text = read_small(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a TOML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not valid TOML: {one_line(error)}; save it as UTF-8 text"
        ) from error
    # A number of thousands of digits raises ValueError, and brackets nested that deep a RecursionError.
    with refused(
        f"{path}: is not valid TOML", ValueError, RecursionError, remedy=_REMEDY
    ):
        return tomllib.loads(text)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set the dotted key of ``key=value`` in nested tables, creating those that are missing."""
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
    # With more than one key, the text had a line break and continued as TOML. No setting is a date, but
    # run=2026-01-31 is a name.
    if parsed.keys() != {"value"} or isinstance(parsed["value"], date | time):
        return text.strip()
    return parsed["value"]
