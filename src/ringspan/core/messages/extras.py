"""Optional packages, and how to install their extra."""

from importlib.util import find_spec
from typing import Final

from ringspan.core.errors import MissingExtraError

EXTRAS: Final = {
    "accelerate": "hf",
    "datasets": "train",
    "tensorboard": "train",
    "matplotlib": "report",
    "jax": "jax",
    "trl": "hf",
    "peft": "peft",
    "bitsandbytes": "qlora",
    "lightning": "lightning",
    "lm_eval": "eval",
}
"""Packages that are imported where they are used, and the extra of ringspan that brings each."""


def installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def remedy(package: str) -> str:
    return f"the extra ringspan[{EXTRAS[package]}]: {command(package)}"


def command(package: str) -> str:
    """Return the command that installs a package's extra from a checkout, as it is not on PyPI."""
    return f"pip install '.[{EXTRAS[package]}]' in a checkout of ringspan"


def require(what: str, *packages: str) -> None:
    for package in packages:
        if not installed(package):
            raise MissingExtraError(f"{what} needs {remedy(package)}")
