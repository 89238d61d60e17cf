"""The file for Modal, imported with a module in place of Modal's, which is not installed here."""

import importlib.util
import shlex
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.examples.platforms import ROOT, environment, put_programs
from tests.train.runs import training_file, write_text

FILE = ROOT / "examples" / "cluster" / "modal_train.py"


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file's module; ``asked`` is what it asks of Modal for its function."""
    modal: Any = MagicMock()
    asked: dict[str, Any] = {}

    def function(**options: Any) -> Any:
        asked.update(options)
        return lambda decorated: decorated

    modal.App.return_value.function = function
    monkeypatch.setitem(sys.modules, "modal", modal)
    spec = importlib.util.spec_from_file_location("modal_train", FILE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.asked = asked
    return module


class Process:
    """A process that is interrupted while it is waited for, and ends with a code when it is told to."""

    def __init__(self, code: int, is_interrupted: bool) -> None:
        self.code, self.is_interrupted, self.signals = code, is_interrupted, list[int]()

    def wait(self) -> int:
        if self.is_interrupted and not self.signals:
            raise KeyboardInterrupt
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize(
    ("code", "is_interrupted"), [(0, False), (75, True), (75, False)]
)
def test_a_container_that_is_taken_back_saves(file, monkeypatch, code, is_interrupted):
    process = Process(code, is_interrupted)
    monkeypatch.setattr(file.subprocess, "Popen", lambda _: process)
    file.train()
    assert process.signals == [signal.SIGTERM] * is_interrupted


def test_a_run_that_fails_fails_the_function(file, monkeypatch):
    monkeypatch.setattr(file.subprocess, "Popen", lambda _: Process(1, False))
    with pytest.raises(RuntimeError, match="exit code 1"):
        file.train()
    assert file.asked["retries"] == 3 and file.asked["gpu"] == "H100:8"
    [place] = file.asked["volumes"]
    assert f"run={place}/" in file.TRAIN


@pytest.mark.long
def test_its_command_trains(file: ModuleType, tmp_path, monkeypatch):
    write_text(tmp_path, files=3)
    (tmp_path / "train.toml").write_text(training_file(tmp_path))
    program = f'exec {shlex.quote(sys.executable)} -m ringspan "$@"'
    put_programs(tmp_path, {"ringspan": program})
    command = file.TRAIN.replace(
        "/src/examples/finetune.toml", f"{tmp_path}/train.toml"
    )
    command = command.replace("--nproc 8", "--nproc 2").replace("/runs", f"{tmp_path}")
    monkeypatch.setattr(file, "TRAIN", command)
    given = environment(tmp_path, {}, without=("RANK",))
    started = subprocess.Popen
    monkeypatch.setattr(
        file.subprocess, "Popen", lambda words: started(words, env=given, cwd=tmp_path)
    )
    file.train()
    assert (tmp_path / "finetune" / "model" / "model.safetensors").is_file()
