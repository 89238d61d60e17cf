"""What coded keys, values and gradients cost in exactness: errors against float64 on rings of 2 and 8 ranks.

    python -m benchmarks.communication_error

The ranks are threads that run the real ring loop; seconds, on any machine. ||x - exact|| / ||exact|| over the whole
sequence, and the bytes that rank 0 sends in a forward and in a backward pass.
"""

import json
from pathlib import Path
from typing import Any, Final

import ringspan as rs
from ringspan.measure.machine import describe_machine
from tests.torch.engine.attention.test_ring import Problem

RESULT: Final = Path(__file__).parent / "results" / "communication-error-cpu.json"
RESULTS: Final = ("out", "dq", "dk", "dv")
CODES: Final[dict[str, dict[str, str]]] = {
    "exact": {},
    "bfloat16": {"comm_dtype": "bfloat16"},
    "int8": {"comm_dtype": "int8"},
    "float8": {"comm_dtype": "float8"},
    "gradients in bfloat16": {"gradient_comm_dtype": "bfloat16"},
}
LENGTH, HEADS, KV_HEADS, HEAD_DIM, LAYOUT = 1024, 4, 2, 64, "zigzag"


def measure() -> list[dict[str, Any]]:
    """A row for each code and number of ranks."""
    problem = Problem(LENGTH, rs.causal(), heads=HEADS, groups=KV_HEADS, size=HEAD_DIM)
    rows: list[dict[str, Any]] = []
    for name, options in CODES.items():
        for ranks in (2, 8):
            _, forward, backward = problem.on_ring(LAYOUT, ranks, **options)
            sent = {
                "forward_bytes": forward[0].sent_bytes,
                "backward_bytes": backward[0].sent_bytes,
            }
            errors = dict(
                zip(RESULTS, problem.errors(LAYOUT, ranks, **options), strict=True)
            )
            rows.append({"code": name, "ranks": ranks, **errors, **sent})
    return rows


if __name__ == "__main__":
    config = {
        "length": LENGTH,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "layout": LAYOUT,
    }
    command = "python -m benchmarks.communication_error"
    result = {
        "command": command,
        "rows": measure(),
        "config": config,
        "machine": describe_machine(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
