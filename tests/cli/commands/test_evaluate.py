"""``ringspan eval``: its object, picture and page; a run that is killed and continues; refusals of one line."""

from typing import Any

import pytest

from ringspan.cli.commands.evaluate import merged
from tests.cases import refusals
from tests.cli.test_bad_input import refusal
from tests.evaluate.models import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(
        tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1024
    )


def test_models_that_lack_positions_are_named_before_evaluation(
    folder, tmp_path, monkeypatch, capsys
):
    short = save(tmp_path / "short", max_position_embeddings=300)
    capsys.readouterr()  # what saving shows
    monkeypatch.chdir(tmp_path)
    line = refusal(
        monkeypatch,
        capsys,
        "eval",
        "lines",
        folder,
        short,
        "--lengths",
        "700",
        "--items",
        "1",
    )
    assert f"{short}: --lengths 700: the model has 300 positions" in line
    assert not list(tmp_path.glob("runs/eval/*"))


def test_one_model_is_named_and_several_are_told_apart_in_rows():
    one: dict[str, Any] = {
        "task": "lines",
        "model": "a",
        "rows": [{"length": 1}],
        "skipped": [],
        "records": "r",
    }
    assert merged([one]) is one
    both = merged([one, {**one, "model": "b"}])
    assert both["model"] == ["a", "b"] and both["rows"] == [
        {"model": "a", "length": 1},
        {"model": "b", "length": 1},
    ]


# Each builds what it asks for until it sees that there is not enough.
SLOW = (
    "eval lines {model} --lengths 99",
    "eval lines {model} --lengths 4096",
    "eval needle {model} --distractors 3000000",
    "eval perplexity {model} --length 4096",
)


@refusals("eval", SLOW)
def test_bad_input_is_refused(
    monkeypatch, capsys, folder, tmp_path, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    given = [
        argument.format(model=folder, empty=tmp_path / "empty")
        for argument in arguments
    ]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in refusal(monkeypatch, capsys, "eval", *given)
