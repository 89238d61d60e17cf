"""A configuration to begin with, and the version."""

import ringspan
from ringspan.train.config.load import load_config
from tests.cli.test_bad_input import printed, refusal


def test_init_writes_a_file_that_loads_and_replaces_none(monkeypatch, capsys, tmp_path):
    file = tmp_path / "mine.toml"
    assert f"ringspan train {file}" in printed(monkeypatch, capsys, "init", file)
    assert load_config(file).data.paths == ("data",)
    file.write_text("precious")
    assert "--force" in refusal(monkeypatch, capsys, "init", file)
    assert file.read_text() == "precious"
    printed(monkeypatch, capsys, "init", file, "--force")
    load_config(file)
    assert "cannot be written" in refusal(monkeypatch, capsys, "init", tmp_path / "no" / "mine.toml")


def test_the_version(monkeypatch, capsys):
    assert printed(monkeypatch, capsys, "--version") == f"ringspan {ringspan.__version__}\n"
