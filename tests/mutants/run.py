"""Judge the mutants: for each fork a process, change one piece of one module on import, and run its test.

The parent imports what is slow to import and nothing of ringspan, so that a child loads the changed code as if it were
so on disk. Writes ``{mutant: [exit code on sound code, exit code on changed code]}``.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

import hypothesis.strategies  # noqa: F401 - imported for the children
import numpy  # noqa: F401
import pytest
import torch.distributed.fsdp
import torch.distributed.launcher.api
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


def start(test: str, mutant: Mutant | None = None) -> int:
    """Fork a process that ends with pytest's exit code for one test; its id."""
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        options = ["-x", "-p", "no:cacheprovider", "--timeout=50"]
        code = 99
        try:
            if mutant:
                sys.meta_path.insert(0, Finder(mutant))
                options.append("--hypothesis-profile=unshrunk")  # that an example fails is enough
            code = int(pytest.main([str(ROOT / "tests" / test), *options]))
        finally:
            os._exit(code)
    return process


def main() -> None:
    torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    runs: list[tuple[str, Mutant | None]] = [(mutant.test, mutant) for mutant in MUTANTS]
    runs += [(test, None) for test in {mutant.test for mutant in MUTANTS}]
    codes: dict[tuple[str, Mutant | None], int] = {}
    under_way: dict[int, tuple[str, Mutant | None]] = {}
    while runs or under_way:
        while runs and len(under_way) < (os.cpu_count() or 1):
            test, mutant = runs.pop()
            under_way[start(test, mutant)] = test, mutant
        process, status = os.wait()
        codes[under_way.pop(process)] = os.waitstatus_to_exitcode(status)
    verdicts = {mutant.name: (codes[mutant.test, None], codes[mutant.test, mutant]) for mutant in MUTANTS}
    Path(sys.argv[1], "verdicts.json").write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main()
