"""``ringspan eval harness`` as its ranks run it: lm-eval's own results, on the first rank of the machine."""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from transformers import AutoTokenizer

from ringspan.cli.commands.evaluate import harness_rank
from ringspan.core.errors import ConfigError
from ringspan.evaluate.settings import HarnessSettings
from ringspan.torch.model.consistency.watchdog import Watchdog
from ringspan.torch.runtime.launch import launch
from tests.evaluate.harness.data import write
from tests.evaluate.harness.test_harness import own_model
from tests.evaluate.models import TEMPLATE, save

_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def heard(settings: HarnessSettings, out: str) -> tuple[Any, list[tuple[str, float]]]:
    """What a rank returns, and the beats of its watchdog: what it does, and for how long at most."""
    with mock.patch.object(
        Watchdog, "be", autospec=True, side_effect=Watchdog.be
    ) as be:
        found = harness_rank(settings, out)
    return found, [call.args[2:] for call in be.call_args_list]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save(
        tmp_path_factory.mktemp("run") / "model",
        template=_NO_SYSTEM + TEMPLATE,
        max_position_embeddings=900,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.long
def test_the_first_rank_has_lm_evals_own_results(folder, tmp_path):
    """With names that have a wildcard, a template that refuses the system's part, and lm-eval's own examples."""
    from lm_eval import simple_evaluate

    from ringspan.evaluate.harness.run import known_tasks, rows_of

    tasks, names = str(write(tmp_path)), ("local_shots", "local_roll*", "local_until")
    settings = HarnessSettings(
        folder=str(folder), tasks=names, include=tasks, chat=True
    )
    (found, beats), (other, _) = launch(
        heard, 2, settings, str(tmp_path / "kept"), threads=1
    )
    assert other is None
    plain: Any = simple_evaluate
    expected = plain(
        own_model(folder),
        tasks=["local_shots", "local_rolling", "local_until"],
        task_manager=known_tasks(tasks, names),
        bootstrap_iters=0,
        apply_chat_template=True,
    )
    assert found["rows"] == [
        {**row, "value": pytest.approx(row["value"], rel=1e-5)}
        for row in rows_of(expected)
    ]
    assert {row["metric"] for row in found["rows"]} >= {
        "brier_score",
        "bits_per_byte",
        "exact_match",
    }
    assert found["seed"] is None
    # No limit while requests are prepared and answers scored; a beat for each token, whatever an answer takes.
    assert beats[0][1] == beats[-1][1] == math.inf
    assert all(seconds == math.inf for what, seconds in beats if "preparing" in what)
    written = [seconds for what, seconds in beats if what.startswith("at token")]
    assert len(written) > 24
    assert set(written) == {600.0}


def test_seeds_are_lm_evals_own_unless_one_is_given(folder):
    asked: dict[str, Any] = {"folder": str(folder), "tasks": ("any",)}
    assert HarnessSettings(**asked).seeds == {}
    assert set(HarnessSettings(**asked, seed=3).seeds.values()) == {3}
    with pytest.raises(
        ConfigError, match=r"--seed 5000000000: should be from 0 to 2\^32 - 1"
    ):
        HarnessSettings(**asked, seed=5_000_000_000)


def test_a_row_for_each_metric_that_is_a_number():
    from ringspan.evaluate.harness.run import rows_of

    values = {
        "alias": "a",
        "sample_len": 4,
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "right,none": 3,
        "f1,strict": np.float32(0.25),
        "acc_stderr,strict": "N/A",
    }
    rows = rows_of({"results": {"a": values}, "n-samples": {"a": {"effective": 4}}})
    assert rows == [
        {"name": "a", "metric": metric, "value": value, "items": 4}
        for metric, value in (("acc", 0.5), ("right", 3.0), ("f1,strict", 0.25))
    ]
