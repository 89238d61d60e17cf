"""What is measured, in the order of its worth: what comes last is lost first when time runs out."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, Final

import torch

from benchmarks.gpu.documents import documents
from benchmarks.gpu.host import ROWS as HOST
from benchmarks.gpu.kernels import Case, compare
from benchmarks.gpu.step import Row, Step, measured, traced
from ringspan.measure.bench.ring import PlayedRank, RingCase, run, timed
from ringspan.measure.machine import package_version

_PACKAGES: Final = (
    "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "liger-kernel", "transformers", "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
)  # fmt: skip
_KERNELS: Final = ("cudnn", "flash", "flash2", "flash3", "flash4", "triton", "eager")


def facts(quick: bool) -> dict[str, Any]:
    """Device, driver, versions; the speed of a large matrix product and of a copy, which bound everything else."""
    found: dict[str, Any] = {
        "packages": {name: package_version(name) for name in _PACKAGES}
    }
    device, dtype = (
        ("cuda", torch.bfloat16)
        if torch.cuda.is_available()
        else ("cpu", torch.float32)
    )
    if device == "cuda":
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,power.limit,clocks.max.sm",
            "--format=csv,noheader",
        ]
        found["driver"] = subprocess.run(
            query, capture_output=True, text=True
        ).stdout.strip()
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "capability": torch.cuda.get_device_capability(),
            "memory_bytes": properties.total_memory,
        }
        found |= {
            "multiprocessors": properties.multi_processor_count,
            "cudnn": torch.backends.cudnn.version(),
        }
    size = 256 if quick else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    found["matmul_flops_per_second"] = 2 * size**3 / _seconds(lambda: a @ b)
    source, target = (
        torch.empty(1 << (16 if quick else 28), dtype=torch.uint8, device=device)
        for _ in range(2)
    )
    found["copy_bytes_per_second"] = source.nbytes / _seconds(
        lambda: target.copy_(source)
    )
    return found


def kernel_errors(quick: bool) -> dict[str, Any]:
    """Every kernel against float64 on masks of all kinds: its worst relative error, or why it does not serve."""
    import ringspan as rs
    from ringspan.torch.engine import kernels
    from ringspan.torch.engine.kernels.contract import Scores
    from tests.torch.engine.attention.test_ring import Problem

    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = 64 if quick else 1024
    documents = rs.documents(
        [length // 8, length // 2, length - length // 8 - length // 2]
    )
    masks = {
        "causal": rs.causal(),
        "window": rs.sliding_window(length // 5),
        "documents": documents,
    }
    found: dict[str, Any] = {}
    for name in (*_KERNELS, "cpu"):
        found[name] = {}
        for text, mask in masks.items():
            problem = Problem(
                length,
                mask,
                heads=4,
                groups=2,
                size=64,
                dtype=torch.bfloat16,
                device=device,
            )
            reason = kernels.why_not(name, problem.q, problem.v, Scores(1.0))
            if reason or (name == "triton" and device == "cpu"):
                found[name] = {"why_not": reason or "only interpreted here"}
                break
            try:
                errors = problem.errors("zigzag", 1, kernel=name)
                found[name][text] = dict(
                    zip(("out", "dq", "dk", "dv"), errors, strict=True)
                )
            except Exception as error:
                found[name][text] = {"error": f"{type(error).__name__}: {error}"}
    return found


def errors_by_ranks(quick: bool) -> dict[str, Any]:
    """Out, dq, dk and dv against float64 on rings of 1, 8 and 64 virtual ranks: flat, whatever the kernel."""
    import ringspan as rs
    from tests.torch.engine.attention.test_ring import Problem

    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = 64 if quick else 2048
    problem = Problem(
        length,
        rs.causal(),
        heads=4,
        groups=2,
        size=64,
        dtype=torch.bfloat16,
        device=device,
    )
    rows = []
    for kernel in ("auto", "triton") if device == "cuda" else ("auto",):
        for ranks in (1, 8, 64 if device == "cuda" else 16):
            errors = problem.errors("zigzag", ranks, kernel=kernel)
            rows.append(
                {
                    "kernel": kernel,
                    "ranks": ranks,
                    **dict(zip(("out", "dq", "dk", "dv"), errors, strict=True)),
                }
            )
    return {"length": length, "rows": rows}


def merge(quick: bool) -> dict[str, Any]:
    """The eager merge of a partial into the running result, and the fused one."""
    from ringspan.torch.engine.kernels.partials.merge import merge_into

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 64 if quick else 8192
    out, lse = (
        torch.randn(1, 32, rows, 128, device=device),
        torch.randn(1, 32, rows, device=device),
    )
    new, new_lse = torch.randn_like(out).bfloat16(), torch.randn_like(lse)
    found = {
        "rows": rows,
        "eager_seconds": _seconds(lambda: merge_into(out, lse, new, new_lse)),
    }
    if device == "cuda":
        from ringspan.torch.engine.kernels.partials import triton_merge

        result, many = torch.empty_like(new), [(new, new_lse)] * 8
        found["fused_seconds"] = _seconds(
            lambda: triton_merge.merge_many(out, lse, [(out, lse), (new, new_lse)])
        )
        moved = 2 * (out.nbytes + lse.nbytes) + new.nbytes + new_lse.nbytes
        found["fused_bytes_per_second"] = moved / found["fused_seconds"]
        found["of_eight_seconds"] = _seconds(
            lambda: triton_merge.merge_many(result, lse, many)
        )
        found["of_eight_bytes_per_second"] = (
            9 * (new.nbytes + lse.nbytes) / found["of_eight_seconds"]
        )
        found["sum_of_eight_seconds"] = _seconds(
            lambda: triton_merge.sum_many(result, [new] * 8)
        )
        found["sum_of_eight_bytes_per_second"] = (
            9 * new.nbytes / found["sum_of_eight_seconds"]
        )
    return found


def _ring(**changes: Any) -> Callable[[bool], dict[str, Any]]:
    def measure(quick: bool) -> dict[str, Any]:
        case = RingCase(error_ranks=(), **changes)
        if quick:
            mask = (
                "window:20"
                if "window" in case.mask
                else "documents:9,40,70,9"
                if ":" in case.mask
                else case.mask
            )
            small = {
                "tokens": 16,
                "heads": 2,
                "kv_heads": 1,
                "head_dim": 16,
                "repeats": 1,
                "mask": mask,
            }
            case = replace(case, kernel="auto", **small)
        return run(case)

    return measure


def changing_documents(**changes: Any) -> Callable[[bool], dict[str, Any]]:
    """Wall seconds of a pass over new documents, and over the same ones again."""

    def measure(quick: bool) -> dict[str, Any]:
        found: dict[str, dict[str, list[float]]] = {"new": {}, "again": {}}
        sizes = changes
        if quick:
            sizes = changes | {
                "tokens": 16,
                "heads": 2,
                "kv_heads": 1,
                "head_dim": 16,
                "kernel": "auto",
            }
        for draw in range(2 if quick else 8):
            mask = documents(128, 32, draw) if quick else documents(65536, 2048, draw)
            one = PlayedRank(RingCase(mask=mask, error_ranks=(), **sizes))
            for when, times in found.items():
                with torch.no_grad():
                    for kind, call in one.passes(
                        is_moving=True, is_warm=when == "again"
                    ).items():
                        times.setdefault(kind, []).append(timed(call, one.device))
        return {
            when: {kind: median(each[1:]) for kind, each in times.items()}
            for when, times in found.items()
        }

    return measure


def profile(quick: bool) -> dict[str, Any]:
    """Operators and kernels of a balanced pass over documents by FlashAttention 2, by torch's profiler."""
    size: dict[str, Any] = {
        "tokens": 16,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "mask": "documents:9,40,70,9",
    }
    if not quick:
        size = {"kernel": "flash", "mask": documents(65536, 2048)}
    calls = PlayedRank(RingCase(layout="balanced", error_ranks=(), **size)).passes(
        is_moving=True
    )
    found: dict[str, Any] = {}
    with torch.no_grad():
        for kind, call in calls.items():
            call()
            with torch.profiler.profile() as profiler:
                call()
            order = (
                "self_cuda_time_total"
                if torch.cuda.is_available()
                else "self_cpu_time_total"
            )
            found[kind] = (
                profiler.key_averages().table(sort_by=order, row_limit=25).splitlines()
            )
    return found


def _seconds(function: Callable[[], Any]) -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return median([timed(function, device) for _ in range(12)][2:])


def _cases(head_dim: int) -> list[Case]:
    plain = [
        Case(mask=mask, tokens=n, head_dim=head_dim)
        for n in _LENGTHS
        for mask in ("causal", "full")
    ]
    return plain + [
        Case(mask=mask, tokens=65536, head_dim=head_dim)
        for mask in (documents(65536, 2048), "window:4096")
    ]


_LENGTHS: Final = (8192, 32768, 131072)
_FLEX: Final = [
    Case(mask=mask, tokens=65536, has_flex=True)
    for mask in (documents(65536, 2048), "window:4096", "causal")
]
STEPS: Final = {
    "llama-8x4k": Step(ring=8, tokens=4096),
    "llama-8x16k": Step(ring=8, tokens=16384),
    "llama-8x1k": Step(ring=8, tokens=1024, repeats=3),
    "llama-8x4k-documents": Step(ring=8, tokens=4096, documents=2048, repeats=4),
    "moe-8x4k": Step(ring=8, tokens=4096, model="qwen3-30b-a3b"),
    "hybrid-8x4k": Step(ring=8, tokens=4096, model="qwen3.5-9b"),
    "lora-8x4k": Step(ring=8, tokens=4096, lora=True),
    "folds-1x64k-once": Step(ring=1, tokens=65536, model="llama-3.2-1b", repeats=1),
    "folds-1x64k-8": Step(
        ring=1, tokens=65536, model="llama-3.2-1b", folds=8, repeats=1
    ),
    "llama-4x32k": Step(ring=4, tokens=32768, repeats=1),
    "llama-4x8k": Step(ring=4, tokens=8192),
    "llama-8x4k-compile": Step(ring=8, tokens=4096, compile=True),
    "llama-4x32k-full": Step(ring=4, tokens=32768, checkpoint="full", repeats=1),
    "llama-8x16k-full": Step(ring=8, tokens=16384, checkpoint="full", repeats=1),
    "llama-4x32k-offload": Step(ring=4, tokens=32768, offload="activations", repeats=1),
    "llama-4x32k-compile": Step(ring=4, tokens=32768, compile=True),
    "llama-8x64k-offload": Step(ring=8, tokens=65536, offload="activations", repeats=1),
}
_GATHERED: Final[dict[str, dict[str, Any]]] = {
    "ring-8k": {},
    **{f"ring-8k-rank{rank}": {"rank": rank, "repeats": 3} for rank in (3, 7)},
    "ring-window": {"mask": "window:4096"},
    "ring-documents": {"mask": documents(65536, 2048)},
    "ring-documents-balanced": {"mask": documents(65536, 2048), "layout": "balanced"},
    "ring-32k": {"tokens": 32768, "repeats": 3},
}
ROWS: Final[dict[str, Row]] = {
    "facts": facts,
    "kernel-errors": kernel_errors,
    "merge": merge,
    "ring-8k": _ring(),
    "errors-by-ranks": errors_by_ranks,
    "ring-documents": _ring(mask=documents(65536, 2048)),
    "ring-documents-balanced": _ring(mask=documents(65536, 2048), layout="balanced"),
    "ring-documents-changing": changing_documents(),
    "ring-window": _ring(mask="window:4096"),
    **{f"ring-8k-rank{rank}": _ring(rank=rank, repeats=3) for rank in (3, 7)},
    "ring-8k-triton": _ring(kernel="triton", repeats=3),
    "ring-32k": _ring(tokens=32768, repeats=3),
    **{
        name.replace("ring", "gathered"): _ring(route="all-gather", **changes)
        for name, changes in _GATHERED.items()
    },
    "gathered-documents-changing": changing_documents(route="all-gather"),
    **{
        f"gathered-{name}-flash4": _ring(
            route="all-gather", kernel="flash4", **_GATHERED[f"ring-{name}"]
        )
        for name in ("8k", "8k-rank7", "documents", "window", "32k")
    },
    "gathered-documents-changing-flash4": changing_documents(
        route="all-gather", kernel="flash4"
    ),
    "documents-changing-cudnn": changing_documents(kernel="cudnn"),
    "profile-balanced": profile,
    **HOST,
    **{case.name: compare(case) for case in (*_cases(128), *_cases(64), *_FLEX)},
    **{name: measured(step) for name, step in STEPS.items()},
    "ring-8k-flash": _ring(kernel="flash", repeats=3),
    **{
        f"trace-{name}": traced(step)
        for name, step in STEPS.items()
        if step.can_be_traced
    },
}
