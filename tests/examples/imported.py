"""Modules of the examples that are folders."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def imported(folder: str, name: str) -> ModuleType:
    """A module of an example, which imports its neighbours as a script does."""
    if str(EXAMPLES / folder) not in sys.path:
        sys.path.insert(0, str(EXAMPLES / folder))
    return importlib.import_module(name)
