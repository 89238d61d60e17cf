"""The page of models: what it says is what was measured, and what was measured keeps its bounds."""

import json

import pytest

from tests.every_model.run import PAGE, RESULTS, TRIALS, is_exact, page
from tests.every_model.tiny import tiny_config

FACTS = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_that_of_the_results():
    assert page(FACTS) == PAGE.read_text(encoding="utf-8")


def test_every_model_that_runs_is_exact_and_none_fails():
    outcomes = [row[trial] for row in FACTS["rows"] for trial in TRIALS if trial in row]
    assert sum("error" in outcome for outcome in outcomes) > 100
    assert all(is_exact(outcome) and "failed" not in outcome for outcome in outcomes)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma4_text", "deepseek_v3"])
def test_a_tiny_config_has_the_sizes_of_its_kind(kind):
    text = tiny_config(kind).get_text_config()
    assert text.vocab_size == 97 and text.hidden_size == 64
