"""Private names of torch that ``ringspan.torch`` uses; a release that lacks one is refused by that name."""

import dis
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
from packaging.version import Version

from ringspan.core.errors import UnsupportedError
from ringspan.torch.runtime.requirements import pip_command

# Private names by place, ``module:Class`` or ``module``, each with its use and the releases that need it.
SEAMS: Final[dict[str, dict[str, str | dict[str, str]]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


@cache
def check_torch() -> None:
    """Raise UnsupportedError if the installed torch lacks a name that ringspan needs, before a model is changed."""
    if (name := next(missing(), None)) is not None:
        raise UnsupportedError(
            f"torch {torch.__version__} lacks {name}, which ringspan needs: {pip_command('torch')}"
        )


def missing() -> Iterator[str]:
    """Yield the names of the table that this release of torch should have and lacks, as ``Class.name``."""
    release = Version(Version(torch.__version__).base_version)
    for place, names in SEAMS.items():
        module, _, kind = place.partition(":")
        owner = _owner(module, kind)
        for alternatives, about in names.items():
            if _is_needed(about, release) and not any(
                _has(owner, name) for name in alternatives.split("|")
            ):
                yield f"{kind or module}.{alternatives.partition('|')[0]}"


def _owner(module: str, kind: str) -> Any:
    try:
        space = import_module(module)
    except ImportError:
        return None
    return getattr(space, kind, None) if kind else space


def _is_needed(about: str | dict[str, str], release: Version) -> bool:
    bounds = {} if isinstance(about, str) else about
    is_old_enough = "until" not in bounds or release < Version(bounds["until"])
    is_new_enough = "since" not in bounds or release >= Version(bounds["since"])
    return is_old_enough and is_new_enough


def _has(owner: Any, name: str) -> bool:
    """Return whether a module or class has a name, or sets it in one of its methods, as ``__init__`` does."""
    if owner is None:
        return False
    return (
        hasattr(owner, name)
        or name in getattr(owner, "__annotations__", {})
        or name in _set_by_methods(owner)
    )


@cache
def _set_by_methods(owner: Any) -> frozenset[str]:
    """Return the attributes that a class's own methods set, which an instance has and the class has not."""
    methods = (
        value for value in vars(owner).values() if isinstance(value, FunctionType)
    )
    steps = (step for method in methods for step in dis.get_instructions(method))
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")
