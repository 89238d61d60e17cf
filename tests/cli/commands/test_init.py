"""A configuration to begin with, and the version."""

import sys

import pytest

import ringspan
from ringspan.cli.main import main
from ringspan.train.config.load import load_config
from tests.cli.test_bad_input import refusal


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["ringspan", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_init_writes_a_file_that_loads_and_replaces_none(monkeypatch, capsys, tmp_path):
    file = tmp_path / "mine.toml"
    assert f"ringspan train {file}" in run(monkeypatch, capsys, "init", file)
    assert load_config(file).data.paths == ("data",)
    file.write_text("precious")
    assert "--force" in refusal(monkeypatch, capsys, "init", file)
    assert file.read_text() == "precious"
    run(monkeypatch, capsys, "init", file, "--force")
    load_config(file)
    assert "cannot be written" in refusal(monkeypatch, capsys, "init", tmp_path / "no" / "mine.toml")


def test_the_version(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version") == f"ringspan {ringspan.__version__}\n"
