"""``ringspan bench cache`` on a tiny model: what it says is what the model's own call says; bad input is one line."""

import json
import sys
from typing import Any

import pytest
from transformers import AutoTokenizer

from ringspan.cli.main import main
from ringspan.core.errors import ConfigError
from ringspan.measure.bench.cache import CacheCase, run
from tests.cli.commands.test_generate import BOOK, save_model, save_tokenizer
from tests.cli.test_bad_input import refusal


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    save_model(folder, max_position_embeddings=600)
    return folder


def printed(monkeypatch, capfd, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["ringspan", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capfd.readouterr()
    assert exit_.value.code == 0, err
    return out


def check(result: dict[str, Any]) -> None:
    """Fewer bits are fewer bytes and a larger error; what is not rounded is what the model has."""
    rows = {row["dtype"]: row for row in result["caches"]}
    assert rows["float32"]["loss"] == result["loss"] and rows["float32"]["logits_error"] == 0
    assert 0 < rows["int8"]["logits_error"] < rows["int4"]["logits_error"]
    assert rows["int8"]["loss_change"] == rows["int8"]["loss"] - result["loss"] != 0
    assert rows["int8"]["perplexity_change"] == pytest.approx(rows["int8"]["perplexity"] / result["perplexity"] - 1)
    own = result["cache_bytes_per_rank"]
    assert own == rows["float32"]["cache_bytes_per_rank"] > rows["int8"]["cache_bytes_per_rank"]
    assert rows["int8"]["cache_bytes_per_rank"] > rows["int4"]["cache_bytes_per_rank"]


def test_the_loss_over_each_cache_is_measured(folder):
    ids = AutoTokenizer.from_pretrained(folder)(7 * BOOK).input_ids
    result = run(CacheCase(folder=str(folder), dtypes=("float32", "int8", "int4"), scored=100), ids)
    check(result)
    assert (result["tokens"], result["scored"], result["dtype"]) == (len(ids), 100, "float32")


def test_the_command_prints_a_table_and_an_object(monkeypatch, capfd, folder, tmp_path):
    (tmp_path / "book.txt").write_text(7 * BOOK)
    given = ("bench", "cache", str(folder), "--text-file", str(tmp_path / "book.txt"), "--ranks", "1", "--scored", "50")
    result = json.loads(printed(monkeypatch, capfd, *given, "--dtypes", "float32,int8,int4", "--json"))
    check(result)
    assert "int8" in printed(monkeypatch, capfd, *given, "--dtypes", "int8", "--length", "300")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--dtypes", "int3"), "unknown dtype of a cache 'int3'"),
        (("--scored", "600"), f"--scored 600: the text has {7 * len(BOOK)} tokens"),
        (("--length", "40"), "the text has 40 tokens"),
        (("--ranks", "0"), "--ranks"),
    ],
)
def test_bad_input_is_refused_in_a_line(monkeypatch, capsys, folder, tmp_path, options, says):
    (tmp_path / "book.txt").write_text(7 * BOOK)
    given = ("bench", "cache", str(folder), "--text-file", str(tmp_path / "book.txt"))
    assert says in refusal(monkeypatch, capsys, *given, *options)


def test_a_text_or_model_that_is_not_there_is_refused(monkeypatch, capsys, folder, tmp_path):
    assert "cannot be read" in refusal(monkeypatch, capsys, "bench", "cache", str(folder), "--text-file", "no.txt")
    assert "no such folder" in refusal(monkeypatch, capsys, "bench", "cache", str(tmp_path / "no"), "--text-file", "-")
    with pytest.raises(ConfigError, match="unknown dtype"):
        CacheCase(folder=str(folder), dtypes=("int3",))  # type: ignore[arg-type]
