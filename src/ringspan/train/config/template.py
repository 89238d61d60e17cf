"""A configuration to begin with, made from its declarations."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ringspan.train.config.problems import table_of
from ringspan.train.config.tables import TrainConfig

_WIDTH: Final = 100
# written although it has a default, since most runs need it
_BEGUN: Final = "model.path"
_HEAD: Final = """\
A training run of ringspan: set model.path and data.paths, then `ringspan train {name} --nproc 8`.

Lines such as "#steps = 100" show the default of a key; remove the # to change it. Any key can be set from the
command line too: `ringspan train {name} steps=20 optimizer.learning_rate=1e-4`. Relative paths are taken from the
current directory."""


def config_template(name: str) -> str:
    """Write a TOML file called ``name``, which ``load_config`` accepts unchanged."""
    fields = TrainConfig.model_fields
    tables: dict[str, Any] = {
        key: field.annotation for key, field in fields.items() if table_of(field)
    }
    lines = [*_comment(_HEAD.format(name=name)), ""]
    for key, field in fields.items():
        if key not in tables:
            lines += _key(key, field, key)
    for key, table in tables.items():
        assert table.__doc__, "each table says what it is"
        about = table.__doc__.partition(": ")[2]
        lines += ["", *_comment(about[0].upper() + about[1:].strip()), f"[{key}]"]
        for inner, field in table.model_fields.items():
            lines += _key(inner, field, f"{key}.{inner}")
    return "\n".join(lines) + "\n"


def _key(key: str, field: FieldInfo, path: str) -> Iterator[str]:
    yield from _comment(" ".join((field.description or "").split()))
    default: Any = field.default
    if default is PydanticUndefined or path == _BEGUN:
        yield f"{key} = {_toml(_example(field, path))}"
    elif default is None:
        yield f"#{key} = {_toml(_example(field, path))}  # not set; this is an example"
    else:
        yield f"#{key} = {_toml(default)}"


def _example(field: FieldInfo, path: str) -> object:
    assert field.examples, f"{path} has no default, so it needs an example"
    return field.examples[0]


def _comment(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield from (
            f"# {line}"
            for line in textwrap.wrap(paragraph, _WIDTH, break_on_hyphens=False)
        )
        if not text.endswith(paragraph):
            yield "#"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            "{ "
            + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items())
            + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
