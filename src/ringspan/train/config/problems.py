"""A training file's tables: their base, and errors in a line, from pydantic's: key, value and remedy."""

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import shortened

Strings = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]
"""Strings; a single one may be written without brackets."""


class Table(BaseModel):
    """A TOML table: no unknown key, no conversion between types ("5" is not 5), no change after loading."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """Explain the first problem, and count the other keys with one; ``root`` is the outermost table."""
    # A misspelt required key is also reported as missing: show the misspelling.
    problems = sorted(
        error.errors(), key=lambda problem: problem["type"] != "extra_forbidden"
    )
    keys = [_locate(problem["loc"], root)[0] for problem in problems]
    others = set(keys) - {keys[0]}
    return _explain_one(problems[0], root) + (
        f" (and {len(others)} more)" if others else ""
    )


def _explain_one(problem: ErrorDetails, root: type[BaseModel]) -> str:
    """Return one of pydantic's errors as a line: the key, its value, what is wrong, and a remedy or the default."""
    key, fields, field = _locate(problem["loc"], root)
    kind, value = problem["type"], problem["input"]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_nearest(key, fields, root)}"
    description = (
        (field.description or "" if field is not None else "")
        .split(". ")[0]
        .rstrip(".")
    )
    if kind == "missing" and table_of(field):
        return f"[{key}]: missing; it sets: {description}; ringspan init writes a file with all tables"
    if kind == "missing":
        return f"{key}: missing; it takes: {description}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{key} = {shown(value)}: should be a table; write [{key}] and its keys below"
    what = (
        problem["msg"]
        .replace("Input should be", "should be")
        .replace("Tuple should", "should")
        .replace("a valid tuple", 'a list, such as ["a", "b"]')
        .replace("a valid string", "a string, in quotes")
        .replace(" after validation", "")
    )
    default = None if field is None or field.is_required() else field.default
    remedy = (
        f"it takes: {description}"
        if default is None
        else f"the default is {shown(default)}"
    )
    return f"{key} = {shown(value)}: {what}; {remedy}"


def _locate(
    loc: tuple[int | str, ...], root: type[BaseModel]
) -> tuple[str, dict[str, FieldInfo], FieldInfo | None]:
    """Return (dotted key, innermost table's fields, field) of an error's place, without pydantic's parts for unions."""
    table: type[BaseModel] | None = root
    fields, field, key = dict(root.model_fields), None, ""
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        elif table is not None:
            fields = dict(table.model_fields)
            field = fields.get(part)
            key += f".{part}" if key else part
            table = table_of(field)
    return key, fields, field


def _nearest(key: str, fields: Mapping[str, Any], root: type[BaseModel]) -> str:
    """Suggest the most similar key of the same table, else of any; else list the table's keys."""
    name = key.split(".")[-1]
    table = key.removesuffix(name)
    elsewhere = {known.split(".")[-1]: known for known in _known_keys(root)}
    for known in ({field: table + field for field in fields}, elsewhere):
        if near := difflib.get_close_matches(name, known, n=1):
            return f"did you mean {known[near[0]]}?"
    return f"known are {', '.join(table + field for field in fields)}"


def _known_keys(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in table.model_fields.items():
        yield prefix + name
        if nested := table_of(field):
            yield from _known_keys(nested, f"{prefix}{name}.")


def table_of(field: FieldInfo | None) -> type[BaseModel] | None:
    kind: Any = None if field is None else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def shown(value: object, limit: int = 80) -> str:
    return shortened(json.dumps(value, default=str, ensure_ascii=False), limit)
