"""Judge the mutants: for each fork a process, change one piece of one module on import, and run its test.

The parent imports what is slow to import and nothing of ringspan, so that a child loads the changed code as if it were
so on disk. Writes ``{mutant: [exit code on sound code, exit code on changed code]}``.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

import numpy  # noqa: F401 - imported for the children
import pytest
import torch.distributed.fsdp
import transformers.modeling_utils  # noqa: F401

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ringspan"


class Changed(SourceFileLoader):
    """Loads a file with one piece replaced."""

    mutant: Mutant

    def get_data(self, path: str) -> bytes:
        source = Path(self.path).read_text()
        count = source.count(self.mutant.old)
        assert count == 1, f"{self.mutant.name}: the code it changes occurs {count} times in {self.mutant.file}"
        return source.replace(self.mutant.old, self.mutant.new).encode()

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


def run(test: str, mutant: Mutant | None = None) -> int:
    """pytest's exit code for one test in a process of its own."""
    process = os.fork()
    if process == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        if mutant or not sys.stdout.isatty():
            os.dup2(null, 1)
        code = 99
        try:
            if mutant:
                sys.meta_path.insert(0, Finder(mutant))
            code = int(pytest.main([str(ROOT / "tests" / test), "-x", "-q", "-p", "no:cacheprovider", "--timeout=50"]))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main() -> None:
    torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    sound = {test: run(test) for test in sorted({mutant.test for mutant in MUTANTS})}
    verdicts = {mutant.name: (sound[mutant.test], run(mutant.test, mutant)) for mutant in MUTANTS}
    Path(sys.argv[1], "verdicts.json").write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main()
