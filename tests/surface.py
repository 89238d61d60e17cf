"""What users rely on is what tests/surface.json says: names, parameters, options, TOML keys and keys of JSON objects.

``python -m tests.surface --write`` writes the file anew, for a change that is meant.
"""

import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

import ringspan
from ringspan.cli.main import app
from ringspan.evaluate.runner import EvalResult
from ringspan.generate.session import Answer
from ringspan.train.config.tables import TrainConfig
from ringspan.train.metrics import StepMetrics
from ringspan.train.run_folder.record import TrainResult

FILE = Path(__file__).with_name("surface.json")
MODEL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 101,
}  # fmt: skip
TINY = [
    "--length",
    "64",
    "--repeats",
    "1",
    "--heads",
    "1",
    "--kv-heads",
    "1",
    "--head-dim",
    "8",
]
# Commands that print one object, in a folder with a model; tests that run them anyway call `check_object`.
OBJECTS = {
    "plan": ["plan", "--json"],
    "plan --rollouts": ["plan", "--rollouts", "8", "--json"],
    "plan --generate": ["plan", "--generate", "--json"],
    "prove": ["prove", "--model", ".", "--ranks", "2", "--json"],
    "plan --group": [
        "plan",
        "--group",
        "8",
        "--completion",
        "9",
        "--prompt",
        "99",
        "--json",
    ],
    "rehearse": [
        "rehearse",
        "--model",
        ".",
        "--devices",
        "4",
        "--length",
        "256",
        "--json",
    ],
    "doctor": ["doctor", "--ranks", "2", "--json"],
    "bench attention": ["bench", "attention", *TINY, "--json"],
}


def signature(function: Any) -> str:
    """Names, kinds and defaults of parameters, without their types."""
    found = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
    ]
    return str(
        found.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    )


def python_names() -> Iterator[tuple[str, str]]:
    """Functions and classes by name, and the public members of a class."""
    from ringspan import hf, lightning  # here, since they take a while

    names = [(name, getattr(ringspan, name)) for name in ringspan.__all__]
    names += [(f"hf.{name}", getattr(hf, name)) for name in hf.__all__]
    names += [
        (f"lightning.{name}", getattr(lightning, name)) for name in lightning.__all__
    ]
    for name, value in names:
        if isinstance(value, type) and issubclass(value, Exception):
            yield name, " ".join(base.__name__ for base in value.__mro__[1:-2])
            continue
        yield name, signature(value)
        if isinstance(value, type):
            for member in sorted(vars(value)):
                attribute = getattr(value, member)
                # torch hangs a hook on the step of an optimizer's class when one is made.
                if not member.startswith("_") and not hasattr(attribute, "hooked"):
                    yield (
                        f"{name}.{member}",
                        signature(attribute) if callable(attribute) else "an attribute",
                    )


def options(command: Any, path: str) -> Iterator[tuple[str, str | None]]:
    """Flags and arguments of a command and of those below it, and their defaults."""
    for parameter in command.params:
        flags = [*parameter.opts, *parameter.secondary_opts]
        default = None if parameter.default is None else str(parameter.default)
        yield f"{path} {' '.join(flags)}", "required" if parameter.required else default
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, f"{path} {name}")


def toml_keys(table: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of a table and of those below it, and their defaults."""
    for name, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(
            field.annotation, BaseModel
        ):
            yield from toml_keys(field.annotation, f"{path}{name}.")
        else:
            default = (
                "required"
                if field.is_required()
                else field.get_default(call_default_factory=True)
            )
            yield f"{path}{name}", json.loads(json.dumps(default, default=str))


def surface() -> dict[str, dict[str, Any]]:
    return {
        "names": dict(python_names()),
        "options": dict(options(typer.main.get_command(app), "ringspan")),
        "TOML keys": dict(toml_keys(TrainConfig)),
        "JSON keys": {
            "train": [field.name for field in fields(TrainResult)],
            "generate": sorted(field.name for field in fields(Answer)),
            "eval": sorted(EvalResult.__annotations__),
            "metrics.jsonl": [field.name for field in fields(StepMetrics)],
        },
    }


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What came, went or is other than before, a line each."""
    return [
        *(f"{name} went" for name in before if name not in now),
        *(f"{name} came" for name in now if name not in before),
        *(
            f"{name} was {kept!r}, is {now[name]!r}"
            for name, kept in before.items()
            if name in now and now[name] != kept
        ),
    ]


def check(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Fails with what changed and what to do."""
    found = changes(before, now)
    if found:
        pytest.fail(
            "changed surface; run `python -m tests.surface --write` if you mean it:\n"
            + "\n".join(found),
            pytrace=False,
        )


def check_object(command: str, result: dict[str, Any]) -> None:
    """The keys of an object that a command has printed."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))["JSON keys"]
    check({command: kept.get(command)}, {command: sorted(result)})


def printed_keys(arguments: list[str]) -> list[str]:
    command = [sys.executable, "-m", "ringspan", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        done = subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        )
    return sorted(json.loads(done.stdout))


def write() -> None:
    """Write the file, with the keys of what commands print: takes a minute."""
    now = surface()
    now["JSON keys"] |= {
        name: printed_keys(arguments) for name, arguments in OBJECTS.items()
    }
    FILE.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.surface --write")
    write()
