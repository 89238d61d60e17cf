"""``benchmarks.generation`` on a small prompt: what it says of the cache, and that both sides wrote the same."""

import json
from pathlib import Path

from benchmarks.generation import GenerateCase, run

LONG = Path(__file__).parents[2] / "benchmarks" / "results" / "long-prompts-cpu.json"


def test_a_share_of_the_cache_and_the_same_text():
    result = run(GenerateCase(length=200, new_tokens=3, repeats=1))
    assert result["same_tokens"]
    tokens = 200 + 3  # the last one is written, and in no cache
    assert (
        result["baseline_cache_bytes"] == 4 * 2 * 2 * 64 * 4 * tokens
    )  # layers, keys and values, heads, size, float32
    per_token = result["baseline_cache_bytes"] / tokens
    assert 0 <= result["cache_bytes_per_rank"] - per_token * tokens / 2 <= per_token * 128  # room, and an open block
    assert result["peak_bytes"] > result["cache_bytes_per_rank"]
    assert (
        min(result["seconds_per_token"], result["prefill_seconds"], result["ratio_token"], result["ratio_prefill"]) > 0
    )


def test_what_is_held_beside_the_cache_does_not_grow_with_the_prompt():
    """As measured: from 8K to 128K tokens the cache grows by sixteen, all else by the token ids and their masks."""
    short, *_, long = json.loads(LONG.read_text())["rows"]
    assert long["length"] == 16 * short["length"] == 131_072
    more = long["peak_beside_the_cache_bytes"] - short["peak_beside_the_cache_bytes"]
    assert more < 24 * (long["length"] - short["length"])
    assert more < 0.05 * short["peak_beside_the_cache_bytes"]
