"""``benchmarks.cache_cost`` on a tiny model: fewer bits are fewer bytes and a larger error."""

import pytest
from transformers import AutoTokenizer

from benchmarks.cache_cost import CacheCase, run
from tests.cli.commands.test_generate import BOOK, save_model, save_tokenizer


@pytest.mark.long
def test_the_loss_over_each_cache_is_measured(tmp_path):
    save_tokenizer(tmp_path)
    save_model(tmp_path, max_position_embeddings=600)
    ids = AutoTokenizer.from_pretrained(tmp_path)(7 * BOOK).input_ids
    result = run(CacheCase(folder=str(tmp_path), ranks=1, dtypes=("float32", "int8", "int4"), scored=100), ids)
    rows = {row["dtype"]: row for row in result["caches"]}
    assert rows["float32"]["loss"] == result["loss"] and rows["float32"]["logits_error"] == 0
    assert 0 < rows["int8"]["logits_error"] < rows["int4"]["logits_error"]
    assert rows["int8"]["loss_change"] == rows["int8"]["loss"] - result["loss"] != 0
    assert rows["int8"]["perplexity_change"] == pytest.approx(rows["int8"]["perplexity"] / result["perplexity"] - 1)
    assert result["cache_bytes_per_rank"] == rows["float32"]["cache_bytes_per_rank"]
    assert rows["float32"]["cache_bytes_per_rank"] > rows["int8"]["cache_bytes_per_rank"]
