"""Tables of what a GPU has measured: kernels, one rank's hops, a training step, errors."""

from typing import Any, Final

from benchmarks.result_files import read, table

_FILES: Final = {"H100": "gpu-nvidia-h100-80gb-hbm3", "H200": "gpu-nvidia-h200"}
_KERNELS: Final = ("cudnn", "triton", "flash", "sdpa cudnn", "sdpa flash")
_HOPS: Final = {
    "ring-8k": "causal, 8,192",
    "ring-32k": "causal, 32,768",
    "ring-window": "window of 4,096, 8,192",
    "ring-documents": "documents of 2,048 on average, 8,192",
    "ring-documents-balanced": "the same in balanced layout",
}
_STEPS: Final = ("llama-4x32k", "llama-4x32k-full", "llama-8x16k", "llama-4x8k", "llama-8x4k")


def _rows(device: str) -> dict[str, Any]:
    return {name: row["result"] for name, row in read(_FILES[device])["rows"].items()}


def kernels() -> str:
    """TFLOP/s of each kernel on one sequence, forward / backward."""
    found = {name: each for name, each in _rows("H200").items() if name.startswith("kernels-")}
    lines = []
    for name, each in found.items():
        _, mask, tokens, size = name.split("-")
        speeds = each["flops_per_second"]
        cells = (_speed(speeds[kernel]) if kernel in speeds else "" for kernel in _KERNELS)
        lines.append((f"{mask}, {int(tokens[:-1]) * 1024:,} x {size}", *cells))
    head = ("mask, tokens x head size", *(f"`{name}`" for name in _KERNELS[:3]), "PyTorch, cuDNN", "PyTorch, flash")
    return table(head, lines, left=1)


def hops() -> str:
    """One rank's hops beside the fastest single kernel on as many pairs."""
    lines = []
    for device in _FILES:
        rows = _rows(device)
        for name, text in _HOPS.items():
            if name in rows:
                one = rows[name]
                shares = (one["efficiency"], one["transfer_share"])
                cells = (f"{each['forward']:.1%} / {each['backward']:.1%}" for each in shares)
                seconds = " / ".join(f"{1000 * one['seconds']['ring'][kind]:.1f}" for kind in ("forward", "backward"))
                lines.append((device, text, _speed(one["flops_per_second"]["ring"]), *cells, seconds))
    head = ("card", "mask, tokens per rank", "TFLOP/s", "of the fastest kernel", "spent on transfers", "ms")
    return table(head, lines, left=2)


def steps() -> str:
    """One rank's training step of Llama 3.1 8B."""
    rows = _rows("H200")
    matmul = rows["facts"]["matmul_flops_per_second"]
    lines = []
    for name in _STEPS:
        one = rows[name]
        step, speed = one["step"], one["flops_per_second"]
        length = step["ring"] * step["tokens"]
        lines.append(
            (
                f"{length:,}",
                step["ring"],
                f"`{step['checkpoint']}`",
                f"{min(one['step_seconds']):.2f}",
                f"{one['tokens_per_second_per_rank']:,.0f}",
                f"{speed / 1e12:.0f}",
                f"{speed / matmul:.0%}",
            )
        )
    head = ("tokens", "ring", "checkpoint", "seconds", "tokens/s per rank", "TFLOP/s", "of a matrix product")
    return table(head, lines, left=0)


def errors() -> str:
    """Largest relative error of out, dq, dk and dv of each kernel in bfloat16."""
    found = _rows("H100")["kernel-errors"]
    masks = ("causal", "window", "documents")
    lines = []
    for kernel, each in found.items():
        if "why_not" not in each:
            lines.append((f"`{kernel}`", *(f"{max(each[mask].values()):.1e}" for mask in masks)))
    return table(("kernel", *masks), lines, left=1)


def _speed(speeds: dict[str, float]) -> str:
    return f"{speeds['forward'] / 1e12:.0f} / {speeds['backward'] / 1e12:.0f}"
