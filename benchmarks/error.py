"""Error against the number of ranks: out, dq, dk and dv of causal attention on 1 to 16 ranks, against float64.

    python -m benchmarks.error

The ranks are threads of one process that run the real ring loop, so no machine of 16 devices is needed, and the result
does not depend on the machine's speed. ||x - exact|| / ||exact|| over the whole sequence; beside it the error that
PyTorch's scaled_dot_product_attention has on the same inputs in one process.
"""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from matplotlib import pyplot
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
from ringspan.measure.machine import describe_machine
from tests.torch.engine.attention.test_ring import FLOAT32_LIMIT, Problem

RESULT: Final = Path(__file__).parent / "results" / "error-cpu.json"
PICTURE: Final = Path(__file__).parents[1] / "docs" / "error.svg"
RANKS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
RESULTS: Final = ("out", "dq", "dk", "dv")
LENGTH, HEADS, KV_HEADS, HEAD_DIM, LAYOUT = 1536, 4, 2, 64, "zigzag"


def measure(dtype: torch.dtype) -> dict[str, Any]:
    """Errors by number of ranks, and those of one process."""
    problem = Problem(
        LENGTH, rs.causal(), heads=HEADS, groups=KV_HEADS, size=HEAD_DIM, dtype=dtype
    )
    exact = [problem.out, *problem.gradients]

    def errors(results: list[np.ndarray]) -> dict[str, float]:
        return {
            name: float(np.linalg.norm(x - y) / np.linalg.norm(y))
            for name, x, y in zip(RESULTS, results, exact, strict=True)
        }

    inputs = [x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    one = [out, *torch.autograd.grad(out, inputs, problem.dout)]
    rows = []
    for ranks in RANKS:
        (out_ring, _, *gradients), _, _ = problem.on_ring(LAYOUT, ranks)
        rows.append({"ranks": ranks, **errors([out_ring, *gradients])})
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "one_process": errors([x.detach().double().numpy() for x in one]),
        "rows": rows,
    }


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    """A panel a dtype; dashed what one process has, grey the bound that the tests hold."""
    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "error"}
    figure, panels = pyplot.subplots(
        1, len(curves), figsize=(10, 4), layout="constrained"
    )
    for axes, curve in zip(panels, curves, strict=True):
        for number, name in enumerate(RESULTS):
            axes.plot(
                RANKS,
                [row[name] for row in curve["rows"]],
                "o-",
                color=f"C{number}",
                markersize=4,
                label=name,
            )
            axes.axhline(
                curve["one_process"][name],
                color=f"C{number}",
                linestyle="--",
                linewidth=1,
            )
        worst = max(
            row[name]
            for name in RESULTS
            for row in (*curve["rows"], curve["one_process"])
        )
        top = FLOAT32_LIMIT if curve["dtype"] == "float32" else worst
        if curve["dtype"] == "float32":
            axes.axhline(FLOAT32_LIMIT, color="grey", linewidth=1)
        axes.set(
            title=curve["dtype"], xlabel="ranks", ylim=(0, 1.15 * top), xscale="log"
        )
        axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative error against float64")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Measure both dtypes, print them, keep them and draw them."""
    curves = [measure(dtype) for dtype in (torch.float32, torch.bfloat16)]
    config = {
        "length": LENGTH,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "layout": LAYOUT,
    }
    result = {"curves": curves, "config": config, "machine": describe_machine()}
    RESULT.write_text(
        json.dumps(
            [{"command": "python -m benchmarks.error", "result": result}], indent=1
        )
        + "\n"
    )
    draw(curves, PICTURE)
    for curve in curves:
        print(curve["dtype"])
        for errors in [
            {"ranks": "one process", **curve["one_process"]},
            *curve["rows"],
        ]:
            print(
                f"  {errors['ranks']!s:12}",
                *(f"{name} {errors[name]:.2e}" for name in RESULTS),
            )


if __name__ == "__main__":
    main()
