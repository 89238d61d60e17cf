"""What a step in folds of one size holds on its rank, from 4K to 512K tokens: tracked bytes, not the process's.

python -m benchmarks.folds > benchmarks/results/folds-cpu.json
"""

import json
import sys
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs
from benchmarks.thin import thin_attention
from ringspan.core.names import CATEGORIES
from ringspan.measure.machine import describe_machine
from ringspan.measure.trace.tracker import MemoryTracker, train_step

K: Final = 1024
FOLD_TOKENS, ONE_PASS, LENGTHS, ROWS_IN = (
    4 * K,
    32 * K,
    tuple(K << n for n in range(2, 10)),
    512,
)
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTHS[-1],
}


def step_bytes(length: int, folds: int) -> dict[str, Any]:
    """Highest activations and temporaries of a step, without the batch's own tokens, and the bytes of those."""
    mesh = rs.init_mesh()
    torch.manual_seed(0)
    model = rs.parallelize(
        LlamaForCausalLM(LlamaConfig(**SIZES)), mesh, folds=folds, offload="activations"
    )
    ids = torch.arange(length).remainder(512)[None]
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh, folds=folds)
    tracker, optimizer = MemoryTracker(), torch.optim.AdamW(model.parameters())
    with tracker, thin_attention(ROWS_IN):
        tracker.watch_model(model)
        tracker.watch("activations", batch.values())
        tokens = tracker.moments[-1].bytes["activations"]
        tracker.restart()
        train_step(tracker, model, optimizer, batch)
    most = max(
        tracker.moments,
        key=lambda each: each.bytes["activations"] + each.bytes["temporaries"],
    )
    held = {
        name: most.bytes[name] - (tokens if name == "activations" else 0)
        for name in CATEGORIES
    }
    return {
        "length": length,
        "folds": folds,
        "batch_bytes": tokens,
        "phase": most.phase,
        "bytes": held,
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    cases = [(length, length // FOLD_TOKENS) for length in LENGTHS] + [
        (n, 1) for n in LENGTHS if n <= ONE_PASS
    ]
    for length, folds in cases:
        print(f"{length:,} tokens in {folds}", file=sys.stderr, flush=True)
        rows.append(step_bytes(length, folds))
    facts = {
        "command": "python -m benchmarks.folds",
        "machine": describe_machine(),
        "model": SIZES,
        "fold_tokens": FOLD_TOKENS,
        "rows_in": ROWS_IN,
    }
    print(json.dumps(facts | {"rows": rows}, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
