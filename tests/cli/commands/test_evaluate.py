"""``ringspan eval``: its object, picture and page; a run that is killed and continues; refusals of one line."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ringspan.cli.commands.evaluate import merged
from tests.cli.test_bad_input import refusal
from tests.evaluate.models import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1024)


def run(folder: Path, *arguments: Any, launcher: tuple[str, ...] = ("-m",)) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, "ringspan", "eval", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["title"]:
            self.titles.append(data)


def test_models_that_lack_positions_are_named_before_evaluation(folder, tmp_path, monkeypatch, capsys):
    short = save(tmp_path / "short", max_position_embeddings=300)
    capsys.readouterr()  # what saving shows
    monkeypatch.chdir(tmp_path)
    line = refusal(monkeypatch, capsys, "eval", "lines", folder, short, "--lengths", "700", "--items", "1")
    assert f"{short}: --lengths 700: the model has 300 positions" in line
    assert not list(tmp_path.glob("runs/eval/*"))


def test_one_model_is_named_and_several_are_told_apart_in_rows():
    one: dict[str, Any] = {"task": "lines", "model": "a", "rows": [{"length": 1}], "skipped": [], "records": "r"}
    assert merged([one]) is one
    both = merged([one, {**one, "model": "b"}])
    assert both["model"] == ["a", "b"] and both["rows"] == [{"model": "a", "length": 1}, {"model": "b", "length": 1}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lines", "nowhere/there/is"], "nowhere/there/is: there is no such folder"),
        (["lines", "./nowhere"], "./nowhere: there is no such folder"),
        (["lines", "{empty}"], "has no config.json"),
        (["lines", "{model}", "{model}"], "the same model twice"),
        (["lines", "{model}", "--lengths", "many"], "--lengths many: give numbers separated by commas"),
        (["lines", "{model}", "--lengths", "1"], "--lengths 1: at least 2 tokens"),
        (["lines", "{model}", "--lengths", "900,900"], "--lengths 900,900: give at least one, and none twice"),
        (["lines", "{model}", "--lengths", "99"], "--lengths 99: the shortest prompt of lines takes"),
        (["lines", "{model}", "--lengths", "4096"], "--lengths 4096: the model has 1,024 positions; give shorter ones"),
        (["needle", "{model}", "--depths", "2"], "--depths 2.0: should be from 0"),
        (["needle", "{model}", "--needles", "0"], "--needles 0: should be at least 1"),
        (["needle", "{model}", "--distractors", "-1"], "--distractors -1: should be at least 0"),
        (["needle", "{model}", "--text", "nowhere.txt"], "--text nowhere.txt: is no file"),
        (["lines", "{model}", "--items", "0"], "--items 0: should be at least 1"),
        (["lines", "{model}", "--nproc", "0"], "--nproc 0: at least one process"),
        (["lines", "{model}", "--picture", "x.gif"], "--picture x.gif: end the name in .png or .svg"),
        (["lines", "{model}", "--page", "x.pdf"], "--page x.pdf: give a file whose name ends in .html"),
        (["lines", "{model}", "--dtype", "int7"], "--dtype int7: should be one of"),
        (["lines", "{model}", "--depths", "0"], "--depths"),
        (["lins", "{model}"], "No such command 'lins'. Did you mean 'lines'?"),
        (["common-word", "{model}"], "Did you mean 'common-words'?"),
        (["perplxity", "{model}"], "Did you mean 'perplexity'?"),
        (["needle", "{model}", "--distractors", "3000000"], "3,000,001 different names are needed, and there are"),
        (["perplexity", "{model}", "--length", "4096"], "--length 4096: the model has 1,024 positions"),
    ],
)
def test_bad_input_is_refused(monkeypatch, capsys, folder, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    given = [argument.format(model=folder, empty=tmp_path / "empty") for argument in arguments]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in refusal(monkeypatch, capsys, "eval", *given)
