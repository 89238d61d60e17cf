"""A layer whose index chooses 256 keys: two ranks, one process of the same code, transformers' dense mask, and memory.

    python -m benchmarks.chosen_keys > benchmarks/results/chosen-keys-cpu.json  # two cores, 16 GB, nothing else running

Each case is a process of its own: two ranks have a thread each, one process has two. transformers is compared with one
process on a shorter sequence. Memory: tensors of one process's step, by category.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

import ringspan as rs
from ringspan.core.names import CATEGORIES
from ringspan.measure.machine import describe_machine
from ringspan.measure.trace.tracker import MemoryTracker, train_step

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "first_k_dense_replace": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 256,
    "mlp_layer_types": ["dense"],
}  # fmt: skip
TOKENS: Final = 16_384
DENSE_TOKENS: Final = 8_192  # of twice as many, transformers needs more than 24 GB
LENGTHS: Final = (8_192, 16_384, 32_768, 65_536)


def model_of(tokens: int) -> Any:
    torch.manual_seed(0)
    return DeepseekV32ForCausalLM(
        DeepseekV32Config(**SIZES, max_position_embeddings=tokens)
    ).train()


def batch_of(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def seconds(model: Any, batch: Any, repeats: int) -> list[float]:
    """Forward and backward, after one that is not counted."""
    found: list[float] = []
    for _ in range(repeats + 1):
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        model(**batch).loss.backward()
        found.append(time.perf_counter() - began)
    return found[1:]


def ring(tokens: int, repeats: int) -> Any:
    mesh = rs.init_mesh()
    return seconds(
        rs.parallelize(model_of(tokens), mesh),
        rs.shard_batch(batch_of(tokens), mesh),
        repeats,
    )


def transformers(tokens: int, repeats: int) -> Any:
    return seconds(model_of(tokens), batch_of(tokens) | {"use_cache": False}, repeats)


def memory(tokens: int, repeats: int) -> Any:
    del repeats
    mesh = rs.init_mesh()
    model = rs.parallelize(model_of(tokens), mesh)
    batch, tracker = rs.shard_batch(batch_of(tokens), mesh), MemoryTracker()
    optimizer = torch.optim.AdamW(model.parameters())
    with tracker:
        tracker.watch_model(model)
        tracker.watch("activations", batch.values())
        tracker.restart()
        train_step(tracker, model, optimizer, batch)
    most = max(
        tracker.moments,
        key=lambda each: each.bytes["activations"] + each.bytes["temporaries"],
    )
    return {
        "phase": most.phase,
        "bytes": {name: most.bytes[name] for name in CATEGORIES},
    }


CASES: Final = {"ring": ring, "transformers": transformers, "memory": memory}


def measured(case: str, tokens: int, repeats: int, ranks: int = 1) -> Any:
    print(f"{case}: {tokens:,} tokens, {ranks} ranks", file=sys.stderr, flush=True)
    launch = (
        []
        if ranks == 1
        else [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
    )
    own = [
        "-m",
        "benchmarks.chosen_keys",
        "--case",
        case,
        "--tokens",
        str(tokens),
        "--repeats",
        str(repeats),
    ]
    threads = {"OMP_NUM_THREADS": str(2 // ranks)}
    done = subprocess.run(
        [sys.executable, *launch, *own],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | threads,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument(
        "--dense-tokens",
        type=int,
        default=DENSE_TOKENS,
        help="of the comparison with transformers",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    asked = parser.parse_args()
    if asked.case is not None:
        found = CASES[asked.case](asked.tokens, asked.repeats)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(found), flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    tokens, dense, repeats = asked.tokens, asked.dense_tokens, asked.repeats
    times = {
        "two ranks": measured("ring", tokens, repeats, 2),
        "one process": measured("ring", tokens, repeats),
        "one process, shorter": measured("ring", dense, repeats),
        "transformers, dense mask, shorter": measured("transformers", dense, repeats),
    }
    middle = {name: median(each) for name, each in times.items()}
    facts = {
        "command": " ".join(["python -m benchmarks.chosen_keys", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": SIZES,
        "tokens": tokens,
        "dense_tokens": dense,
        "seconds": times,
        "two_ranks_over_one_process": middle["two ranks"] / middle["one process"],
        "transformers_over_one_process": middle["transformers, dense mask, shorter"]
        / middle["one process, shorter"],
        "memory": [
            {"tokens": length} | measured("memory", length, 1)
            for length in asked.lengths
        ],
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
