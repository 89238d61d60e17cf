"""Tokens of a mixture of experts that rounding, or a step of training, sends to other experts: their share.

    python -m benchmarks.route_changes > benchmarks/results/route-changes-cpu.json

The model is a small Qwen3-MoE with random weights: the figures tell that routes change, not how many of a trained
model's do. ``choices`` is the share of (token, layer) pairs with another set of experts than one process in float32
chose before the step, ``tokens`` that of tokens with another set in any layer.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import ringspan as rs
from ringspan.measure.machine import describe_machine
from ringspan.torch.runtime.launch import launch

LENGTH: Final = 2048
CONFIG: Final[dict[str, Any]] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "use_cache": False,
}


@dataclass(frozen=True, kw_only=True)
class RouteCase:
    """A ring, a dtype, and the learning rate of a step of AdamW before the routes are read; 0 makes none."""

    ranks: int = 1
    dtype: str = "float32"
    learning_rate: float = 0.0


CASES: Final = (
    RouteCase(ranks=2),
    RouteCase(ranks=4),
    RouteCase(dtype="bfloat16"),
    RouteCase(ranks=2, dtype="bfloat16"),
    RouteCase(ranks=4, dtype="bfloat16"),
    RouteCase(learning_rate=1e-6),
    RouteCase(learning_rate=1e-5),
    RouteCase(learning_rate=1e-4),
)


def routes_of(case: RouteCase) -> Tensor:
    """Return the experts (tokens, layers, K) of a sequence, in ascending order; every rank calls it."""
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
    mesh = rs.init_mesh(ring=case.ranks)
    model = rs.parallelize(model.to(getattr(torch, case.dtype)), mesh)
    ids = torch.randint(0, CONFIG["vocab_size"], (1, LENGTH))
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    if case.learning_rate:
        optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate)
        model.train()(**batch).loss.backward()
        optimizer.step()
    routes = rs.token_routes(model.eval(), batch)[0].sort(-1).values
    return routes.cpu()


def compared(found: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the shares of choices and of tokens whose experts differ."""
    differs = (found != expected).any(-1)
    return {
        "choices": float(differs.double().mean()),
        "tokens": float(differs.any(-1).double().mean()),
    }


def main() -> None:
    """Measure, and print the result as one JSON object."""
    expected = launch(routes_of, 1, RouteCase(), threads=1)[0]
    rows = [
        asdict(case)
        | compared(launch(routes_of, case.ranks, case, threads=1)[0], expected)
        for case in CASES
    ]
    command = "python -m benchmarks.route_changes"
    print(json.dumps({"command": command, "machine": describe_machine(), "rows": rows}))


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from benchmarks import route_changes

    route_changes.main()
