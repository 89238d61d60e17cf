"""The reference, made of what it describes: ``__all__``, the command line's own parser, the config's fields.

Directives: ``{ringspan-api} ringspan.hf``, ``{ringspan-commands}``, ``{ringspan-toml}``.
"""

import json
import re
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin

import typer
from docutils import nodes
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ringspan.cli.main import app as command_line
from ringspan.train.config.tables import TrainConfig


class Api(SphinxDirective):
    """All public names of a module, by their docstrings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        return self.parse_text_to_nodes(
            "\n".join(_api(module)), allow_section_headings=True
        )


def _api(module: str) -> Iterator[str]:
    names = import_module(module).__all__
    errors, classes, functions = [], [], []
    for name in names:
        value = getattr(import_module(module), name)
        if isinstance(value, type):
            (errors if issubclass(value, Exception) else classes).append(name)
        else:
            functions.append(name)
    for kind, found in (
        ("function", functions),
        ("class", classes),
        ("exception", errors),
    ):
        for name in found:
            yield from ("```{eval-rst}", f".. auto{kind}:: {module}.{name}")
            if kind == "class":
                yield from (
                    ("   :members:", "   :undoc-members:")
                    if _is_ours(module, name)
                    else ()
                )
            yield from ("```", "")


def _is_ours(module: str, name: str) -> bool:
    """Members of trainers and strategies are their libraries'; of ours they are the surface."""
    bases = getattr(import_module(module), name).__mro__[1:]
    return all(
        base.__module__.split(".")[0] in ("ringspan", "builtins", "typing")
        for base in bases
    )


class Commands(SphinxDirective):
    """Every command with what ``--help`` says of it."""

    def run(self) -> list[nodes.Node]:
        text = "\n".join(_command(typer.main.get_command(command_line), "ringspan", 2))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def _command(command: Any, path: str, level: int) -> Iterator[str]:
    below = getattr(command, "commands", {})
    if path != "ringspan":
        yield from (f"{'#' * level} {path}", "", _prose(command.help or ""), "")
        arguments = [
            each for each in command.params if each.param_type_name == "argument"
        ]
        usage = " ".join(_usage(each) for each in arguments)
        yield from (
            "```",
            f"{path} {'COMMAND' if below else usage} [OPTIONS]".replace("  ", " "),
            "```",
            "",
        )
        yield from _parameters(command)
        if command.epilog:
            yield from _examples(command.epilog)
    for name, inner in below.items():
        yield from _command(inner, f"{path} {name}", level + (path != "ringspan"))


def _usage(argument: Any) -> str:
    name = argument.name.upper() if argument.required else f"[{argument.name.upper()}]"
    return name + ("..." if argument.nargs == -1 else "")


def _parameters(command: Any) -> Iterator[str]:
    rows = []
    for each in command.params:
        flags = ", ".join(f"`{flag}`" for flag in [*each.opts, *each.secondary_opts])
        if each.param_type_name == "argument":
            flags = f"`{each.name.upper()}`"
        if each.default is None or each.default is False or each.required:
            default = "required" if each.required else ""
        else:
            default = f"`{getattr(each.default, 'value', each.default)}`"
        rows.append(
            f"| {flags} | {default} | {_cell(getattr(each, 'help', '') or '')} |"
        )
    if rows:
        yield from ("| option | default | meaning |", "| --- | --- | --- |", *rows, "")


def _examples(epilog: str) -> Iterator[str]:
    """The examples of a command's last lines, as code; what else is said there, as a sentence."""
    for sentence in re.split(r"(?<=[^.])\. (?=[A-Z])", " ".join(epilog.split())):
        label, _, example = sentence.partition(": ")
        if example.startswith(("ringspan", "torchrun")):
            yield from (
                f"{label}:",
                "",
                "```",
                *re.split(r"(?:; |, | \| )(?=ringspan )", example.rstrip(".")),
                "```",
                "",
            )
        else:
            yield from (_prose(sentence), "")


class Toml(SphinxDirective):
    """Every key of a training file: default, type and meaning, from where the config declares it."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(
            "\n".join(_tables(TrainConfig)), allow_section_headings=True
        )


def _tables(model: type[BaseModel]) -> Iterator[str]:
    tables = {
        name: field
        for name, field in model.model_fields.items()
        if _is_table(field.annotation)
    }
    plain = {
        name: field for name, field in model.model_fields.items() if name not in tables
    }
    yield from ("## At the head of the file", "", *_keys(plain), "")
    for name, field in tables.items():
        table: Any = field.annotation
        said = (table.__doc__ or "").partition(": ")[2].strip()
        yield from (
            f"## [{name}]",
            "",
            said[:1].upper() + said[1:],
            "",
            *_keys(table.model_fields),
            "",
        )


def _keys(fields: Any) -> Iterator[str]:
    yield from ("| key | default | takes | meaning |", "| --- | --- | --- | --- |")
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        shown = (
            "required"
            if field.is_required()
            else "not set"
            if default is None
            else f"`{_toml(default)}`"
        )
        if default is PydanticUndefined:
            shown = "required"
        yield f"| `{name}` | {shown} | {_cell(_type(field.annotation))} | {_cell(field.description or '')} |"


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _toml(value: Any) -> str:
    return json.dumps(value, default=str)


def _type(annotation: Any) -> str:
    """What a key takes, in words a TOML file's author uses."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f'"{value}"' for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in inside if part is not type(None))
    if origin is tuple or origin is list:
        return f"list of {_type(inside[0])}"
    if hasattr(annotation, "__metadata__"):
        return _type(inside[0])
    return {int: "integer", float: "number", str: "text", bool: "true or false"}.get(
        annotation, "table"
    )


def _prose(text: str) -> str:
    """Help, with what looks like HTML left as it is written."""
    return text.replace("<", "&lt;").strip()


def _cell(text: str) -> str:
    return (
        " ".join(text.split())
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("*", "\\*")
        .replace("$", "\\$")
    )


def literal_blocks(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Code and formulas that a docstring sets off by four spaces are literal blocks."""
    found: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside and found and not found[-1] and any(found):
            before = next(each for each in reversed(found) if each)
            if not before.startswith((" ", ".. ", "Args:", "Raises:", "Returns:")):
                found += ["::", ""]
        inside = indented or (inside and not line)
        found.append(line)
    lines[:] = found


def setup(app: Sphinx) -> dict[str, Any]:
    # before napoleon
    app.connect("autodoc-process-docstring", literal_blocks, priority=400)
    app.add_directive("ringspan-api", Api)
    app.add_directive("ringspan-commands", Commands)
    app.add_directive("ringspan-toml", Toml)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
