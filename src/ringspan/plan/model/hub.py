"""Models and data sets of the Hugging Face Hub, only from the local cache if it is out of reach."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import one_line

_PROBE_SECONDS: Final = 5.0
_ID: Final = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")


@contextmanager
def from_hub(what: str, name: str) -> Iterator[None]:
    """Let a block load ``name``, a folder or Hub id, from the cache if the Hub is out of reach; else ConfigError."""
    if Path(name).exists():
        yield
        return
    if not _ID.fullmatch(name):
        raise ConfigError(
            f"{what}: there is no such folder in {Path.cwd()}; correct it, or give a Hub id, owner/name"
        )
    reason = out_of_reach()
    if reason is None:
        yield
        return
    try:
        with _offline():
            yield
    except (
        OSError
    ) as error:  # so are the errors of the Hub's clients for what is not in the cache
        raise ConfigError(
            f"{what}: is neither in {Path.cwd()} nor in the local cache, and the Hub is out of reach ({reason}); "
            "download it where there is a network, or give a local folder"
        ) from error


@lru_cache(maxsize=1)
def out_of_reach() -> str | None:
    """Return why the Hub cannot be asked, after one request; None if it answers, with any status."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception as error:  # depends on the HTTP library that huggingface_hub uses
        return f"{constants.ENDPOINT}: {one_line(error, 80)}"
    return None


@contextmanager
def _offline() -> Iterator[None]:
    """Act as if HF_HUB_OFFLINE had been set when the Hub's clients were imported."""
    from huggingface_hub import constants

    # datasets keeps a copy of the flag. It is slow to import, so set it only if it was imported.
    modules: list[Any] = [constants]
    if "datasets" in sys.modules:
        modules.append(sys.modules["datasets"].config)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
