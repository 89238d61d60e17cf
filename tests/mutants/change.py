"""Change one piece of one module when it is imported, in this process and in those that it starts."""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Final

from tests.mutants.mutants import MUTANTS, Mutant

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "ringspan"
_VARIABLE: Final = "RINGSPAN_MUTANT"


class Changed(SourceFileLoader):
    """Loads a file with one piece replaced."""

    mutant: Mutant

    def get_data(self, path: str) -> bytes:
        return self.mutant.change(Path(self.path).read_text()).encode()

    def path_stats(self, path: str) -> dict[str, int]:
        raise OSError("no cached bytecode")


class Finder:
    """Gives the mutant's module the loader above and leaves the others alone."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant, self._path = mutant, str(SOURCE / mutant.file)

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin != self._path:
            return None
        spec.loader = Changed(name, self._path)
        spec.loader.mutant = self._mutant
        spec.cached = None
        return spec


def change(mutant: Mutant) -> None:
    """Change what is imported from now on, here and in every Python process that is started: ranks import afresh.

    Python imports a module named ``sitecustomize`` first, wherever it is on its path; ours calls ``change_as_parent``.
    """
    os.environ[_VARIABLE] = mutant.name
    paths = [
        str(Path(__file__).parent / "site"),
        str(ROOT),
        str(SOURCE.parent),
        os.environ.get("PYTHONPATH", ""),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.meta_path.insert(0, Finder(mutant))


def change_as_parent() -> None:
    """Change what the process that started this one changes, if it does."""
    name = os.environ.get(_VARIABLE)
    if name:
        sys.meta_path.insert(
            0, Finder(next(mutant for mutant in MUTANTS if mutant.name == name))
        )
