"""Judge the mutants: for each fork a process, change one piece of one module on import, and run its test.

The parent imports what is slow to import and nothing of ringspan, so that a child loads the changed code as if it were
so on disk. Ranks of its test's pool fork from the child, others import that code afresh. Two more children run all of
these tests on the sound code, with few examples: that they pass with all of them the suite shows. Writes
`{mutant: pytest's exit code}`, and those of the sound code as "0" and "1".
"""

import importlib
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.mutants.change import ROOT, change
from tests.mutants.mutants import Mutant, chosen

# Half of what a short test takes; and warnings as errors, which ranks would inherit.
NOT_NEEDED = (
    "cacheprovider",
    "anyio",
    "unraisableexception",
    "threadexception",
    "warnings",
)
IMPORTED = (
    *(
        "hypothesis.strategies",
        "numpy",
        "torch.distributed.fsdp",
        "torch.distributed.launcher.api",
    ),
    *(
        "transformers.models.llama.modeling_llama",
        "datasets",
        "peft",
        "trl",
        "trl.experimental.orpo",
    ),
)


def start(tests: Iterable[str], mutant: Mutant | None = None) -> int:
    """Fork a process that ends with pytest's exit code; its id."""
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # Whether it fails is all that is asked: neither why nor with which values.
        # A bug may make ranks wait for each other; sound code is only slow, on a machine that others use too.
        seconds = 50 if mutant else 600
        options = [
            "-x",
            f"--timeout={seconds}",
            "--tb=no",
            "--assert=plain",
            "-m",
            "not long",
        ]
        options += [f"-pno:{plugin}" for plugin in NOT_NEEDED]
        code = 99
        try:
            if mutant:
                change(mutant)
                # that an example fails is enough
                options.append("--hypothesis-profile=unshrunk")
            else:
                os.environ["RINGSPAN_FUZZ"] = "0.05"
            from tests.pool import Pool  # now, for it imports ringspan

            Pool.start_method = "forkserver" if torch.cuda.is_available() else "fork"
            code = int(
                pytest.main([*(str(ROOT / "tests" / test) for test in tests), *options])
            )
        finally:
            os._exit(code)
    return process


def main() -> None:
    torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    sound = sorted({mutant.test for mutant in chosen()})
    runs: list[tuple[str, list[str], Mutant | None]] = [
        (mutant.name, [mutant.test], mutant) for mutant in chosen()
    ]
    half = len(sound) // 2
    runs += [("0", sound[:half], None), ("1", sound[half:], None)]
    verdicts: dict[str, int] = {}
    under_way: dict[int, str] = {}
    while runs or under_way:
        # one more, for some wait
        while runs and len(under_way) <= (os.cpu_count() or 1):
            name, tests, mutant = runs.pop()
            under_way[start(tests, mutant)] = name
        process, status = os.wait()
        verdicts[under_way.pop(process)] = os.waitstatus_to_exitcode(status)
    Path(sys.argv[1], "verdicts.json").write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main()
