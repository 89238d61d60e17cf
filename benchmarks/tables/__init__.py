"""Tables of pages, computed or read from ``benchmarks/results``: ``python -m benchmarks.tables`` fills them in.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; a test fails when a page has another one.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import retrieval
from benchmarks.tables import counts, gpu, kernels, learnt, memory, speed

DOCS: Final = Path(__file__).parents[2] / "docs"
TABLES: Final[dict[str, Callable[[], str]]] = {
    "overlap-devices": counts.overlap_devices,
    "overlap": partial(counts.overlap, "overlap-cpu"),
    "overlap-amd": partial(counts.overlap, "overlap-cpu-amd"),
    "layouts": counts.layouts,
    "balanced": counts.balanced,
    "received": counts.received,
    "states": counts.states,
    "shared-prefixes": counts.shared_prefixes,
    "communication": counts.communication,
    "errors-float": partial(counts.errors, "float32"),
    "errors-bfloat": partial(counts.errors, "bfloat16"),
    "log-prob-gap": counts.log_prob_gap,
    "host-cost": counts.host_cost,
    "route-changes": counts.route_changes,
    "vllm-rollouts": counts.vllm_rollouts,
    "faults": counts.faults,
    "versions": counts.versions,
    "kernels": kernels.serves,
    "attention": partial(speed.attention, "attention-cpu"),
    "attention-amd": partial(speed.attention, "attention-cpu-amd"),
    "step": partial(speed.step, "step-cpu"),
    "option-times": speed.option_times,
    "jax": partial(speed.jax_attention, "jax-attention-cpu"),
    "jax-amd": partial(speed.jax_attention, "jax-attention-cpu-amd"),
    "peers-float": partial(speed.peers, "peers-cpu", "float32"),
    "peers-bfloat": partial(speed.peers, "peers-cpu", "bfloat16"),
    "peers-amd-float": partial(speed.peers, "peers-cpu-amd", "float32"),
    "peers-amd-bfloat": partial(speed.peers, "peers-cpu-amd", "bfloat16"),
    "routes": speed.routes,
    "nodes": speed.nodes,
    "packed": speed.packed,
    "packed-layouts": speed.packed_layouts,
    "windows": speed.windows,
    "balance": speed.balance,
    "kernel-rows": speed.kernel_rows,
    "option-bytes": memory.option_bytes,
    "kept-activations": memory.activations,
    "blocks": memory.blocks,
    "contexts-measured": memory.contexts,
    "row-samples": memory.row_samples,
    "tpus": memory.tpus,
    "weights": memory.weights,
    "traced": memory.traced,
    "prompts": memory.prompts,
    "ancestors": memory.ancestors,
    "retrieval": retrieval.accuracies,
    "gpu-steps": gpu.steps,
    "gpu-kernels": gpu.kernels,
    "gpu-hops": gpu.hops,
    "gpu-errors": gpu.errors,
    "in-context-rl-grid": partial(learnt.returns, "grid"),
    "in-context-rl-point": partial(learnt.returns, "point"),
    "in-context-rl-memory-grid": partial(learnt.memory, "grid"),
}
PAGES: Final = (
    "how-to/vllm.md",
    "understand/overlap.md",
    "understand/ancestors.md",
    "memory.md",
    "reference/versions.md",
    "jax.md",
    "performance.md",
    "gpu.md",
    "peers.md",
    "overlap.md",
    "error.md",
    "published.md",
    "routes.md",
    "layouts.md",
    "masks.md",
    "shared-prefixes.md",
    "generation.md",
    "hybrids.md",
    "weights.md",
    "trainers.md",
    "reliability.md",
    "evaluation.md",
)


def filled(text: str) -> str:
    """A page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        if found[1] not in TABLES:  # of another module
            return found[0]
        return f"<!-- table {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(
        r"<!-- table ([a-z-]+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL
    )
