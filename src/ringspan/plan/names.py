"""Lookup of names, with near ones for an unknown one."""

import difflib
from collections.abc import Iterable

from ringspan.core.errors import ConfigError


def normal(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def unknown(
    what: str, name: str, known: Iterable[str], remedy: str = ""
) -> ConfigError:
    """Build the error for an unknown name, with the most similar known ones, or all."""
    known = list(known)
    near = difflib.get_close_matches(normal(name), known, n=3, cutoff=0.5)
    shown = (
        f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(known)}"
    )
    return ConfigError(f"unknown {what} {name!r}; {shown}{remedy}")
