"""Tables of what a GPU has measured: kernels, one rank's hops, a training step, errors."""

from typing import Any, Final

from benchmarks.result_files import read, table

_FILES: Final = {
    "H100": "gpu-nvidia-h100-80gb-hbm3", "H100, flash4": "gpu-nvidia-h100-80gb-hbm3-flash4", "H200": "gpu-nvidia-h200",
}  # fmt: skip
_KERNELS: Final = ("flash4", "cudnn", "triton", "flash", "sdpa cudnn")
_HOPS: Final = {
    "8k": "causal, 8,192",
    "8k-rank7": "the same, rank 7",
    "32k": "causal, 32,768",
    "window": "window of 4,096, 8,192",
    "documents": "documents of 2,048 on average, 8,192",
    "documents-balanced": "the same in balanced layout",
}
_STEPS: Final = {
    "llama-4x32k": "Llama 3.1 8B", "llama-4x32k-full": "Llama 3.1 8B", "llama-8x16k": "Llama 3.1 8B",
    "llama-4x8k": "Llama 3.1 8B", "llama-8x4k": "Llama 3.1 8B", "llama-8x4k-documents": "the same, new documents",
    "llama-8x1k": "Llama 3.1 8B", "moe-8x4k": "Qwen3 30B-A3B", "hybrid-8x4k": "Qwen3.5 9B",
}  # fmt: skip


def _rows(device: str) -> dict[str, Any]:
    return {
        name: row["result"]
        for name, row in read(_FILES[device])["rows"].items()
        if "result" in row
    }


def kernels() -> str:
    """TFLOP/s of each kernel on one sequence, forward / backward."""
    lines = []
    for device in ("H100, flash4", "H200"):
        for name, each in _rows(device).items():
            if name.startswith("kernels-"):
                _, mask, tokens, size = name.split("-")
                speeds = each["flops_per_second"]
                cells = (
                    _speed(speeds[kernel]) if kernel in speeds else ""
                    for kernel in _KERNELS
                )
                lines.append(
                    (
                        device.partition(",")[0],
                        f"{mask}, {int(tokens[:-1]) * 1024:,} x {size}",
                        *cells,
                    )
                )
    head = (
        "card",
        "mask, tokens x head size",
        *(f"`{name}`" for name in _KERNELS[:4]),
        "PyTorch, cuDNN",
    )
    return table(head, lines, left=2)


def hops() -> str:
    """One rank's pass beside the fastest single kernel on as many pairs."""
    lines = []
    for device in _FILES:
        rows = _rows(device)
        for route in ("ring", "gathered"):
            for name, text in _HOPS.items():
                kernel = "-flash4" * device.endswith("flash4")
                if (one := rows.get(f"{route}-{name}{kernel}")) is not None:
                    times = (
                        one.get("device_seconds", {}),
                        {"ring": one.get("host_seconds", {}).get("ring", {})},
                    )
                    shares = " / ".join(
                        f"{one['efficiency'][kind]:.0%}" for kind in _KINDS
                    )
                    cells = (
                        _speed(one["flops_per_second"]["ring"]),
                        shares,
                        *map(_milliseconds, times),
                    )
                    wall = _milliseconds(one["seconds"])
                    where = "`all-gather`" if route == "gathered" else "`ring`"
                    lines.append((device, text, where, *cells, wall))
    head = (
        "card",
        "mask, tokens per rank",
        "route",
        "TFLOP/s",
        "of the fastest kernel",
        "device ms",
        "host ms",
        "wall ms",
    )
    return table(head, lines, left=3)


def steps() -> str:
    """One rank's training step."""
    lines = []
    for device in ("H200", "H100, flash4"):
        rows = _rows(device)
        matmul = rows["facts"]["matmul_flops_per_second"]
        for name, model in _STEPS.items():
            if (one := rows.get(name)) is None:
                continue
            step, speed = one["step"], one["flops_per_second"]
            lines.append(
                (
                    device,
                    model,
                    f"{step['ring'] * step['tokens']:,}",
                    step["ring"],
                    f"`{step['checkpoint']}`",
                    f"{min(one['step_seconds']):.2f}",
                    f"{one['tokens_per_second_per_rank']:,.0f}",
                    f"{speed / 1e12:.0f}",
                    f"{speed / matmul:.0%}",
                )
            )
    head = (
        "card",
        "model",
        "tokens",
        "ring",
        "checkpoint",
        "seconds",
        "tokens/s per rank",
        "TFLOP/s",
        "of a matrix product",
    )
    return table(head, lines, left=2)


def errors() -> str:
    """Largest relative error of out, dq, dk and dv of each kernel in bfloat16."""
    found = _rows("H100")["kernel-errors"]
    masks = ("causal", "window", "documents")
    lines = []
    for kernel, each in found.items():
        if "why_not" not in each:
            lines.append(
                (f"`{kernel}`", *(f"{max(each[mask].values()):.1e}" for mask in masks))
            )
    return table(("kernel", *masks), lines, left=1)


_KINDS: Final = ("forward", "backward")


def _milliseconds(seconds: dict[str, Any]) -> str:
    return (
        " / ".join(f"{1000 * seconds['ring'][kind]:.1f}" for kind in _KINDS)
        if seconds.get("ring")
        else ""
    )


def _speed(speeds: dict[str, float]) -> str:
    return f"{speeds['forward'] / 1e12:.0f} / {speeds['backward'] / 1e12:.0f}"
