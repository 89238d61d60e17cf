"""Whether the text of a run is there at all: asked first, before what its folder holds."""

from collections.abc import Iterable
from pathlib import Path

from ringspan.core.errors import ConfigError


def refuse_missing(paths: Iterable[str]) -> None:
    """Refuse data.paths that name nothing; data sets of the Hub are not asked for.

    Raises:
        ConfigError: a path does not exist, or cannot be looked at.
    """
    for name in paths:
        if name.startswith("hub:"):
            continue
        try:
            if Path(name).expanduser().exists():
                continue
        except (OSError, RuntimeError) as error:  # too long a name; no such user
            raise ConfigError(f'data.paths = "{name}": cannot be read: {error}; correct it') from error
        raise ConfigError(
            f'data.paths = "{name}": does not exist in {Path.cwd()}; correct it, or write "hub:{name}" for the Hub'
        )
