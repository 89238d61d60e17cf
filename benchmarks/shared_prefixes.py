"""A step over one prompt with many answers, as a tree and as rows, in turns.

torchrun --nproc-per-node 2 -m benchmarks.shared_prefixes
"""

import json
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs
from ringspan.measure.machine import describe_machine

RESULT: Final = Path(__file__).parent / "results" / "shared-prefixes-cpu.json"
PROMPT, ANSWER, COUNT, REPEATS = 4096, 256, 8, 5
SIZES: Final = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def measure(mesh: DeviceMesh) -> dict[str, Any]:
    """Seconds of forward and backward after one round of warming up, and the loss, by way."""
    torch.manual_seed(0)
    prompt = torch.randint(0, 97, (PROMPT,))
    rows = [torch.cat((prompt, torch.randint(0, 97, (ANSWER,)))) for _ in range(COUNT)]
    labels = [torch.cat((torch.full((PROMPT,), -100), row[PROMPT:])) for row in rows]
    model = rs.parallelize(LlamaForCausalLM(LlamaConfig(**SIZES)), mesh)
    ways = {
        "tree": rs.share_prefixes(rows, labels).batch,
        "rows": {"input_ids": torch.stack(rows), "labels": torch.stack(labels)},
    }
    found: dict[str, Any] = {
        name: {"tokens": batch["input_ids"].numel(), "seconds": []}
        for name, batch in ways.items()
    }
    for number in range(REPEATS + 1):
        for name, batch in ways.items():
            begun = time.perf_counter()
            loss = model(**rs.shard_batch(batch, mesh)).loss
            loss.backward()
            if number:
                found[name]["seconds"].append(round(time.perf_counter() - begun, 3))
            found[name]["loss"] = float(loss.detach())
            model.zero_grad()
    return found


def main() -> None:
    mesh = rs.init_mesh()
    found = measure(mesh)
    if dist.get_rank() == 0:
        facts = {
            "command": "torchrun --nproc-per-node 2 -m benchmarks.shared_prefixes",
            "machine": describe_machine(),
            "prompt": PROMPT,
            "answers": [ANSWER] * COUNT,
            "model": SIZES,
        }
        RESULT.write_text(json.dumps(facts | found, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
