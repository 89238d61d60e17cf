"""What the compiler of NVIDIA's GPUs makes of our Triton kernels, without a GPU: registers, spills and shared memory
of every block size that tuning tries, as JSON.

    python -m pip install triton
    python -m benchmarks.triton_kernels

``spilled_bytes`` are what a thread stores to and loads from memory for want of registers, by ptxas; ``fits`` says
whether a multiprocessor of the device has that much shared memory for a program. Nothing runs: this says nothing about
speed.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import whole
from ringspan.gpu.support import interprets_triton
from ringspan.measure.machine import describe_machine
from ringspan.torch.engine.kernels.contract import BackwardInputs, Scores
from ringspan.torch.engine.kernels.local import triton_attention
from ringspan.torch.engine.kernels.partials import triton_merge

RESULT: Final = Path(__file__).parent / "results" / "triton-compiled.json"
SHARED_BYTES: Final = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What a program may have, by compute capability (CUDA C++ Programming Guide, technical specifications)."""

BATCH, HEADS, KV_HEADS, TOKENS = 1, 32, 8, 8192
CASES: Final[tuple[tuple[int, torch.dtype, int, int, bool], ...]] = (
    (90, torch.bfloat16, 64, 64, False),
    (90, torch.bfloat16, 128, 128, False),
    (90, torch.bfloat16, 128, 128, True),
    (90, torch.bfloat16, 192, 128, False),
    (90, torch.bfloat16, 256, 256, False),
    (90, torch.float32, 64, 64, False),
    (90, torch.float32, 128, 128, False),
    (80, torch.bfloat16, 128, 128, False),
    (100, torch.bfloat16, 128, 128, False),
)
_TUNED: Final = "_forward", "_backward_queries", "_backward_keys"


class _Absent:
    """A device that is described and not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # by which Triton remembers what it has compiled

    def get_current_stream(self, _: int) -> int:
        return 0


class _Compiled:
    """Takes the place of a kernel: a call compiles it for what it is given, and keeps what came of that.

    ``configs`` says in which ways, given the call's arguments and options.
    """

    def __init__(
        self, capability: int, kernel: Any, configs: Callable[..., list[dict[str, int]]]
    ) -> None:
        self._capability, self._kernel, self._configs = capability, kernel, configs
        self.rows: list[dict[str, Any]] = []

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return self._compile

    def _compile(self, *args: Any, **options: Any) -> None:
        for config in self._configs(
            dict(zip(self._kernel.arg_names, args, strict=False)), **options
        ):
            compiled = self._kernel.warmup(*args, grid=(1,), **(options | config))
            names = {
                name.lower().removeprefix("num_"): number
                for name, number in config.items()
            }
            shared = compiled.metadata.shared
            self.rows.append(
                {
                    "kernel": self._kernel.__name__.strip("_"),
                    **names,
                    **_counted(compiled.asm["ptx"]),
                    "shared_bytes": shared,
                    "fits": shared <= SHARED_BYTES[self._capability],
                }
            )


def _counted(ptx: str) -> dict[str, Any]:
    """What ptxas says of a program."""
    found = re.search(r"\.target sm_((\d+)\w*)", ptx)
    assert found, "a program for no device"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(int(found[2])).path, "-v"]
        command += [f"--gpu-name=sm_{found[1]}", file.name, "-o", "/dev/null"]
        told = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stderr
    registers, stored, loaded = (
        int(found[1]) if (found := re.search(pattern, told)) else 0
        for pattern in (
            r"Used (\d+) registers",
            r"(\d+) bytes spill stores",
            r"(\d+) bytes spill loads",
        )
    )
    return {"registers": registers, "spilled_bytes": [stored, loaded]}


@contextmanager
def compiling(capability: int, blocks: slice) -> Iterator[list[_Compiled]]:
    """Our kernels are compiled instead of run: what is yielded holds what came of that."""

    def tuned(kernel: Any) -> _Compiled:
        def configs(arguments: dict[str, Any], **options: Any) -> list[dict[str, int]]:
            tried = kernel.early_config_prune(kernel.configs, arguments, **options)
            return [one.all_kwargs() for one in tried[blocks]]

        return _Compiled(capability, kernel.fn, configs)

    kernels = [tuned(getattr(triton_attention, name)) for name in _TUNED]
    merge = _Compiled(capability, triton_merge._merge, lambda *_, **__: [{}])  # pyright: ignore[reportPrivateUsage]
    with (
        patch.object(driver, "_active", _Absent(capability)),
        patch.multiple(triton_attention, **dict(zip(_TUNED, kernels, strict=True))),
        patch.object(triton_merge, "_merge", merge),
    ):
        yield [*kernels, merge]


def compile_all(
    capability: int,
    dtype: torch.dtype,
    size: int,
    value_size: int,
    has_more: bool,
    blocks: slice = slice(None),
) -> list[dict[str, Any]]:
    """Forward, backward and merge of one causal tile, by some of the block sizes that tuning would try there; with a
    soft cap and ALiBi when there is more.
    """

    def some(heads: int, *sizes: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(BATCH, heads, TOKENS, *sizes, dtype=of, device="meta")

    q, k, v = some(HEADS, size), some(KV_HEADS, size), some(KV_HEADS, value_size)
    out, lse = some(HEADS, value_size), some(HEADS, of=torch.float32)
    scores = Scores(size**-0.5)
    if has_more:
        slopes = torch.empty(HEADS, device="meta")
        positions = torch.empty(TOKENS, dtype=torch.int64, device="meta")
        scores = Scores(size**-0.5, 30.0, slopes, positions, positions)
    [launch] = whole((Tile(0, TOKENS, 0, TOKENS, 0, TOKENS),))
    sums = [x.float() for x in (q, k, v)]
    with compiling(capability, blocks) as kernels:
        triton_attention.forward_into(q, k, v, launch, scores, out.float(), lse)
        triton_attention.backward_into(
            BackwardInputs(out, q, k, v, out, lse), launch, scores, *sums
        )
        triton_merge.merge_many(out, lse, [(out.float(), lse), *[(out, lse)] * 7])
    return [row for kernel in kernels for row in kernel.rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=RESULT, help="the JSON file to write"
    )
    output = parser.parse_args().output
    if interprets_triton():
        raise SystemExit(
            "TRITON_INTERPRET=1 is set, and the interpreter compiles nothing; unset it"
        )
    results: list[dict[str, Any]] = []
    for case in CASES:
        capability, dtype, size, value_size, has_more = case
        described = {
            "compute_capability": capability / 10,
            "dtype": str(dtype).removeprefix("torch."),
            "head_size": size,
            "value_head_size": value_size,
            "softcap_and_alibi": has_more,
        }
        results.append({**described, "kernels": compile_all(*case)})
        for row in results[-1]["kernels"]:
            print(json.dumps(described | row), file=sys.stderr)
    command = shlex.join(["python", "-m", "benchmarks.triton_kernels", *sys.argv[1:]])
    result = {
        "command": command,
        "machine": describe_machine() | {"triton": version("triton")},
        "cases": results,
    }
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
