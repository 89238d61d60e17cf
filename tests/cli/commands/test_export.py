"""``ringspan export``: what it prints, and what it refuses."""

import json

import pytest
from transformers import AutoModelForCausalLM

from tests.cli.test_bad_input import printed, refusal
from tests.train.test_loop import settings, text, train_on  # noqa: F401  text is a fixture


@pytest.fixture(scope="module")
def run(pool, text):  # noqa: F811
    pool.run(train_on, 4, settings(text, "run", steps=2, checkpoints={"every_steps": 1}))
    return text / "run"


def test_it_says_what_it_wrote(run, tmp_path, monkeypatch, capsys):
    result = json.loads(printed(monkeypatch, capsys, "export", run, "1", tmp_path / "first", "--json"))
    weights = tmp_path / "first" / "model.safetensors"
    assert result.pop("bytes") == pytest.approx(weights.stat().st_size, rel=0.1)
    assert result == {"step": 1, "folder": str(tmp_path / "first")}
    assert printed(monkeypatch, capsys, "export", run, "latest", tmp_path / "last").startswith(
        f"wrote {tmp_path / 'last'}: step 2, "
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "last").num_parameters() > 0


@pytest.mark.parametrize(
    ("step", "folder", "options", "message"),
    [
        ("newest", "new", [], "STEP = 'newest': give the number of a step, or latest"),
        ("-1", "new", [], "No such option"),
        ("7", "new", [], "has no checkpoint of step 7; there are 1, 2"),
        ("latest", ".", [], "is there already; give another folder, or remove it"),
        ("latest", "new", ["--max-shard-size", "lots"], "max_shard_size='lots'"),
        ("latest", "new", ["--max-shard-size", "-1GB"], "max_shard_size='-1GB'"),
        ("latest", "new", ["--max-shard-size", "0"], "max_shard_size='0'"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, monkeypatch, capsys, step, folder, options, message):
    said = refusal(monkeypatch, capsys, "export", run, step, tmp_path / folder, *options)
    assert message in said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_run_is_named(tmp_path, monkeypatch, capsys):
    said = refusal(monkeypatch, capsys, "export", tmp_path, "latest", tmp_path / "new")
    assert "is no folder of a run (run.json is missing)" in said
