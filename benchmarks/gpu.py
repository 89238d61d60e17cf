"""Everything that is to be measured on one CUDA device, in one run of under nine minutes.

    python -m benchmarks.gpu                       # writes benchmarks/results/gpu-<device>.json
    python -m benchmarks.gpu --rows ring-8k,merge  # only these; the others in the file stay
    python -m benchmarks.gpu --quick --output /tmp # small sizes, on a CPU too: a dry run

Each row runs in a process of its own and is written as soon as it is there, so that a failure, or the end of the time,
loses nothing else: such a row holds its error. The file says device, driver and versions.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from ringspan.measure.bench.machine import describe_machine
from ringspan.measure.bench.ring import RingCase, run, timed

RESULTS: Final = Path(__file__).parent / "results"
BUDGET_SECONDS: Final = 530.0
_ROW_SECONDS: Final = 150.0
_PACKAGES: Final = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "transformers", "nvidia-cudnn-cu13")
_KERNELS: Final = ("cudnn", "flash", "flash2", "flash3", "flash4", "triton", "eager")
# What to reach: a rank's hops by the fastest kernel at the same FLOPs, and what transfers may cost of the time.
MARKS: Final = {
    "ring-8k": {"forward": 0.97, "backward": 0.96},
    "ring-32k": {"forward": 0.98, "backward": 0.98},
    "ring-documents": {"forward": 0.92, "backward": 0.92},
    "ring-window": {"forward": 0.85, "backward": 0.85},
}
MOST_TRANSFER_SHARE: Final = 0.02
LEAST_SHARE_OF_MATMUL: Final = 0.5


def facts(quick: bool) -> dict[str, Any]:
    """Device, driver, versions; the speed of a large matrix product and of a copy, which bound everything else."""
    found: dict[str, Any] = {"packages": {name: _version(name) for name in _PACKAGES}}
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        properties = torch.cuda.get_device_properties(0)
        found |= {"capability": torch.cuda.get_device_capability(), "memory_bytes": properties.total_memory}
        found |= {"multiprocessors": properties.multi_processor_count, "cudnn": torch.backends.cudnn.version()}
    size = 256 if quick else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    found["matmul_flops_per_second"] = 2 * size**3 / _seconds(lambda: a @ b)
    source, target = (torch.empty(1 << (16 if quick else 28), dtype=torch.uint8, device=device) for _ in range(2))
    found["copy_bytes_per_second"] = source.nbytes / _seconds(lambda: target.copy_(source))
    return found


def kernel_errors(quick: bool) -> dict[str, Any]:
    """Every kernel against float64 on masks of all kinds: its worst relative error, or why it does not serve."""
    import ringspan as rs
    from ringspan.torch import kernels
    from ringspan.torch.kernels.score_mod import Scores
    from tests.torch.attention.test_ring import Problem

    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = 64 if quick else 1024
    documents = rs.documents([length // 8, length // 2, length - length // 8 - length // 2])
    masks = {"causal": rs.causal(), "window": rs.sliding_window(length // 5), "documents": documents}
    found: dict[str, Any] = {}
    for name in (*_KERNELS, "cpu"):
        found[name] = {}
        for text, mask in masks.items():
            problem = Problem(length, mask, heads=4, groups=2, size=64, dtype=torch.bfloat16, device=device)
            reason = kernels.why_not(name, problem.q, problem.v, Scores(1.0))
            if reason or (name == "triton" and device == "cpu"):
                found[name] = {"why_not": reason or "only interpreted here"}
                break
            try:
                errors = problem.errors("zigzag", 1, kernel=name)
                found[name][text] = dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))
            except Exception as error:
                found[name][text] = {"error": f"{type(error).__name__}: {error}"}
    return found


def errors_by_ranks(quick: bool) -> dict[str, Any]:
    """Out, dq, dk and dv against float64 on rings of 1, 8 and 64 virtual ranks: flat, whatever the kernel."""
    import ringspan as rs
    from tests.torch.attention.test_ring import Problem

    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = 64 if quick else 2048
    problem = Problem(length, rs.causal(), heads=4, groups=2, size=64, dtype=torch.bfloat16, device=device)
    rows = []
    for kernel in ("auto", "triton") if device == "cuda" else ("auto",):
        for ranks in (1, 8, 64 if device == "cuda" else 16):
            errors = problem.errors("zigzag", ranks, kernel=kernel)
            rows.append({"kernel": kernel, "ranks": ranks, **dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))})
    return {"length": length, "rows": rows}


def merge(quick: bool) -> dict[str, Any]:
    """The eager merge of a partial into the running result, and the fused one."""
    from ringspan.torch.kernels.partials.partial import merge_into

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 64 if quick else 8192
    out, lse = torch.randn(1, 32, rows, 128, device=device), torch.randn(1, 32, rows, device=device)
    new, new_lse = torch.randn_like(out).bfloat16(), torch.randn_like(lse)
    found = {"rows": rows, "eager_seconds": _seconds(lambda: merge_into(out, lse, new, new_lse))}
    if device == "cuda":
        from ringspan.torch.kernels.partials import triton_merge

        found["fused_seconds"] = _seconds(lambda: triton_merge.merge_into(out, lse, new, new_lse))
        moved = 2 * (out.nbytes + lse.nbytes) + new.nbytes + new_lse.nbytes
        found["fused_bytes_per_second"] = moved / found["fused_seconds"]
    return found


def _ring(**changes: Any) -> Callable[[bool], dict[str, Any]]:
    def measure(quick: bool) -> dict[str, Any]:
        case = RingCase(error_ranks=(), **changes)
        if quick:
            mask = "window:20" if "window" in case.mask else "documents:9,40,70,9" if ":" in case.mask else case.mask
            small = {"tokens": 16, "heads": 2, "kv_heads": 1, "head_dim": 16, "repeats": 1, "mask": mask}
            case = replace(case, kernel="auto", **small)
        return run(case)

    return measure


def _documents(total: int, mean: int) -> str:
    """Lengths of documents around a mean, the same every time."""
    lengths: list[int] = []
    generator = np.random.default_rng(0)
    while sum(lengths) < total:
        lengths.append(int(generator.integers(mean // 4, 2 * mean - mean // 4)))
    lengths[-1] -= sum(lengths) - total
    return "documents:" + ",".join(str(length) for length in lengths if length)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rank's training step of a Llama 3.1 8B."""

    ring: int
    tokens: int = 32768
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336
    vocabulary: int = 128256
    dtype: str = "bfloat16"


def _setup(step: Step) -> tuple[Any, Any]:
    from transformers import LlamaConfig

    from ringspan.plan.cost.setting import Setting

    config = LlamaConfig(
        vocab_size=step.vocabulary,
        hidden_size=step.hidden,
        intermediate_size=step.intermediate,
        num_hidden_layers=step.layers,
        num_attention_heads=step.heads,
        num_key_value_heads=step.kv_heads,
        max_position_embeddings=step.ring * step.tokens,
        rope_theta=500000.0,
        attention_dropout=0.0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    length = step.ring * step.tokens
    return config, Setting(length=length, ring=step.ring, compute_dtype=step.dtype, parameter_dtype=step.dtype)


def _small(step: Step) -> Step:
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 64, "vocabulary": 128}
    return replace(step, tokens=16, **sizes)


def _step(ring: int) -> Callable[[bool], dict[str, Any]]:
    """One rank's step on this device: nobody answers, so blocks and gathered weights hold anything, at full size."""

    def measure(quick: bool) -> dict[str, Any]:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from transformers import AutoModelForCausalLM

        import ringspan as rs

        step = _small(Step(ring=ring)) if quick else Step(ring=ring)
        config, setup = _setup(step)
        is_cuda = torch.cuda.is_available()
        device = torch.device("cuda" if is_cuda else "cpu")
        dist.init_process_group("fake", rank=0, world_size=ring, store=FakeStore())
        mesh = rs.init_mesh(ring=ring)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, step.dtype)).train()
        parameters = sum(p.numel() for p in model.parameters())
        model = rs.parallelize(model, mesh, layout=setup.layout, checkpoint="attention")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

        def one(tokens: int) -> None:
            ids = torch.zeros(1, ring * tokens, dtype=torch.int64)
            batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh, layout=setup.layout, device=device)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        one(min(2048, step.tokens))  # tunes, and makes the optimizer's state
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = [timed(lambda: one(step.tokens), device) for _ in range(2)]
        length = ring * step.tokens
        attention = step.layers * 4 * (step.tokens * length / 2) * step.hidden * 3.5
        flops = 6 * (parameters - step.vocabulary * step.hidden) * step.tokens + attention
        found = {"step": asdict(step), "parameters": parameters, "step_seconds": seconds}
        found |= {"tokens_per_second_per_rank": step.tokens / min(seconds), "flops_per_step": flops}
        found["flops_per_second"] = flops / min(seconds)
        if is_cuda:
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        return found

    return measure


def _trace(ring: int) -> Callable[[bool], dict[str, Any]]:
    """The same step's peak by the dry run, on the CPU: what ``llama-ring-N`` is to stay within 5% of."""

    def measure(quick: bool) -> dict[str, Any]:
        from ringspan.measure.trace.dry_run import trace

        step = _small(Step(ring=ring)) if quick else Step(ring=ring)
        peak = trace(*_setup(step)).peak
        return {"step": asdict(step), "peak_bytes": peak.total_bytes, "bytes": peak.bytes, "phase": peak.phase}

    return measure


# In the order of their worth: what comes last is lost first when time runs out.
ROWS: Final[dict[str, Callable[[bool], dict[str, Any]]]] = {
    "facts": facts,
    "kernel-errors": kernel_errors,
    "merge": merge,
    "ring-8k": _ring(),
    "errors-by-ranks": errors_by_ranks,
    "ring-documents": _ring(mask=_documents(65536, 2048)),
    "ring-window": _ring(mask="window:4096"),
    "ring-8k-triton": _ring(kernel="triton", repeats=3),
    "ring-32k": _ring(tokens=32768, repeats=3),
    "llama-ring-4": _step(4),
    "llama-ring-8": _step(8),
    "ring-8k-flash": _ring(kernel="flash", repeats=3),
    "trace-ring-4": _trace(4),
    "trace-ring-8": _trace(8),
}
_ON_CPU: Final = ("trace-ring-4", "trace-ring-8")


def main(arguments: list[str] | None = None) -> None:
    """Measure the rows that were asked for and keep each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="which, with commas")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a dry run")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the row that this process measures
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(ROWS[options.one](options.quick)))
        return
    names = options.rows.split(",")
    if unknown := sorted(set(names) - set(ROWS)):
        raise SystemExit(f"--rows: no row is called {', '.join(unknown)}; choose from {', '.join(ROWS)}")
    if not torch.cuda.is_available() and not options.quick:
        raise SystemExit("there is no CUDA device; --quick makes a dry run on the CPU")
    machine = describe_machine()
    options.output.mkdir(parents=True, exist_ok=True)
    name = "quick-" if options.quick else ""
    path = options.output / f"gpu-{name}{machine['device'].lower().replace(' ', '-')}.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else {}
    started = time.monotonic()
    traces = {row: _start(row, options.quick, on_cpu=True) for row in names if row in _ON_CPU}
    for row in names:
        left = BUDGET_SECONDS - (time.monotonic() - started)
        process = traces.get(row) or (_start(row, options.quick) if left > 10 else None)
        kept[row] = _finish(process, min(_ROW_SECONDS, max(left, 1.0)))
        found = {"command": "python -m benchmarks.gpu", "machine": machine, "summary": summary(kept), "rows": kept}
        path.write_text(json.dumps(found, indent=1) + "\n")
        outcome = kept[row].get("error", "measured").splitlines()[-1]
        print(f"{row}: {outcome} ({kept[row]['seconds']:.0f} s)", file=sys.stderr, flush=True)


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Each measured number beside its mark."""
    results = {name: row["result"] for name, row in rows.items() if "result" in row}
    found: dict[str, Any] = {}
    for name in MARKS.keys() & results.keys():
        for kind, mark in MARKS[name].items():
            found[f"{name} {kind}"] = {"measured": results[name]["efficiency"][kind], "at_least": mark}
            share = results[name]["transfer_share"][kind]
            found[f"{name} {kind} transfers"] = {"measured": share, "at_most": MOST_TRANSFER_SHARE}
    for ring in (4, 8):
        step, traced = results.get(f"llama-ring-{ring}"), results.get(f"trace-ring-{ring}")
        if step and "facts" in results:
            share = step["flops_per_second"] / results["facts"]["matmul_flops_per_second"]
            found[f"llama-ring-{ring} of matmul"] = {"measured": share, "at_least": LEAST_SHARE_OF_MATMUL}
        if step and traced and "peak_bytes" in step:
            ratio = step["peak_bytes"] / traced["peak_bytes"]
            found[f"llama-ring-{ring} memory over trace"] = {"measured": ratio, "at_least": 0.95, "at_most": 1.05}
    return dict(sorted(found.items()))


def _start(row: str, quick: bool, on_cpu: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--one", row, *(["--quick"] if quick else [])]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"} if on_cpu else {})
    root = Path(__file__).parents[1]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=environment
    )


def _finish(process: subprocess.Popen[str] | None, limit: float) -> dict[str, Any]:
    """What a row's process printed, or what went wrong with it."""
    started = time.monotonic()
    if process is None:
        return {"error": "not measured: the time was over", "seconds": 0.0}
    try:
        out, problems = process.communicate(timeout=limit)
        found = json.loads(out.splitlines()[-1]) if process.returncode == 0 else None
        row = {"result": found} if found is not None else {"error": problems.strip()[-2000:]}
    except subprocess.TimeoutExpired:
        process.kill()
        row = {"error": f"not measured: it took longer than {limit:.0f} s"}
    except (ValueError, IndexError):
        row = {"error": traceback.format_exc(limit=1)}
    return row | {"seconds": time.monotonic() - started}


def _seconds(function: Callable[[], Any]) -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return median([timed(function, device) for _ in range(12)][2:])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
