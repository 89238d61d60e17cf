"""Prompts of 8K, 32K and 128K tokens on two ranks, from the start of the processes to 20 new tokens: times and memory.

    python -m benchmarks.long_prompts

A Llama of two layers with random weights in float32. A rank's peak is what it allocates at most from the call of
``generate`` to its end: its share of the cache, the gathered weights (14.7 MB), and what a chunk of the prompt takes.
Beside the cache it should be the same at every length.
"""

import json
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers.generation.streamers import BaseStreamer

import ringspan as rs
from ringspan.measure.bench.one_process import StepCase, small_llama
from ringspan.measure.machine import allocated_bytes, describe_machine
from ringspan.torch.runtime.launch import launch

RESULT: Final = Path(__file__).parent / "results" / "long-prompts-cpu.json"
RANKS: Final = 2
LENGTHS: Final = (8192, 32_768, 131_072)
NEW_TOKENS: Final = 20
LAYERS: Final = 2


class Times(BaseStreamer):
    """When the prompt came, and each token after it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: Any) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is kept back."""


def generated(length: int, started: float) -> dict[str, Any]:
    """One rank's part; ``started`` is the wall clock when the processes were."""
    case = StepCase(ranks=RANKS, length=length + NEW_TOKENS, layers=LAYERS)
    model: Any = small_llama(case)
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.eos_token_id = None
    model = rs.parallelize(model.eval(), rs.init_mesh(ring=RANKS))
    ids = torch.randint(
        1, case.vocabulary, (1, length), generator=torch.Generator().manual_seed(0)
    )
    cache, times = model.new_cache(), Times()
    ready, began = time.time() - started, time.perf_counter()

    def write() -> None:
        text = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            streamer=times,
        )
        assert text.shape[1] == length + NEW_TOKENS

    peak = allocated_bytes(write)
    first, last = times.seconds[1], times.seconds[-1]
    largest = torch.tensor([peak, cache.nbytes])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    peak, of_cache = largest.tolist()
    return {
        "length": length,
        "start_seconds": ready,
        "first_token_seconds": first - began,
        "seconds_per_token": (last - first) / (NEW_TOKENS - 1),
        "whole_seconds": time.time() - started,
        "cache_bytes_per_rank": of_cache,
        "peak_bytes": peak,
        "peak_beside_the_cache_bytes": peak - of_cache,
    }


def main() -> None:
    """Measure each length in processes of its own, and write the result."""
    rows = []
    for length in LENGTHS:
        rows.append(launch(generated, RANKS, length, time.time(), threads=1)[0])
        print(json.dumps(rows[-1]), flush=True)
        facts = {
            "command": "python -m benchmarks.long_prompts",
            "config": {
                "ranks": RANKS,
                "new_tokens": NEW_TOKENS,
                "layers": LAYERS,
                "dtype": "float32",
            },
            "machine": describe_machine(),
            "rows": rows,
        }
        RESULT.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from benchmarks import long_prompts

    long_prompts.main()
