"""Options of a training step, from a training file or its ``key=value`` settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ringspan.core.errors import ConfigError
from ringspan.core.step_config import StepConfig
from ringspan.train.config.load import apply_override, load_config
from ringspan.train.config.problems import Table, explain
from ringspan.train.config.tables import (
    AttentionConfig,
    MemoryConfig,
    MeshConfig,
    TrainConfig,
    step_options,
)


class StepTables(Table):
    """Tables of a training file that say how a step is computed."""

    mesh: MeshConfig = MeshConfig()
    """How the processes are arranged."""
    attention: AttentionConfig = AttentionConfig()
    """Attention on the ring."""
    memory: MemoryConfig = MemoryConfig()
    """Memory of the backward pass."""


@dataclass(frozen=True)
class AskedStep:
    """The options of a step that differ from the defaults, the sizes of the mesh, and a training file's model."""

    options: dict[str, Any]
    sizes: dict[str, Any]
    model: str = ""


def read_step(settings: Sequence[str]) -> AskedStep:
    """Read a training file, if the first setting is one, and ``key=value`` settings; ConfigError for unknown keys."""
    tables: StepTables | TrainConfig
    if settings and "=" not in settings[0]:
        tables = load_config(settings[0], settings[1:])
        model = tables.model.path or ""
    else:
        tables, model = _tables(settings), ""
    plain = StepConfig()
    options = {
        name: value
        for name, value in step_options(tables.attention, tables.memory).items()
        # What "auto" chooses depends on sizes that a small model does not have.
        if value != getattr(plain, name) and (value != "auto" or name == "route")
    }
    return AskedStep(options, tables.mesh.model_dump(), model)


def _tables(settings: Sequence[str]) -> StepTables:
    values: dict[str, Any] = {}
    for setting in settings:
        apply_override(values, setting)
    try:
        return StepTables.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, StepTables)) from error
