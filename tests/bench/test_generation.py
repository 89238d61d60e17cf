"""``benchmarks.generation`` on a small prompt: what it says of the cache, and that both sides wrote the same."""

import pytest

from benchmarks.generation import GenerateCase, run


@pytest.mark.long
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
