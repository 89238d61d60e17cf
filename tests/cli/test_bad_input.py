"""Bad input: one clear line, exit code 2, and nothing written."""

import os
import re
import subprocess
import sys

import pytest

from ringspan.cli.main import main
from tests.cases import refusals
from tests.train.runs import training_file


@pytest.fixture
def workplace(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(
        "the quick brown fox jumps over the lazy dog\n" * 400
    )
    (tmp_path / "config.toml").write_text(training_file(tmp_path))
    return tmp_path


def ended(monkeypatch, capsys, *arguments, code):
    """What a command writes to the standard output and the standard error in this process, with its exit code."""
    monkeypatch.setattr(sys, "argv", ["ringspan", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == code
    return capsys.readouterr()


def printed(monkeypatch, capsys, *arguments, code=0):
    return ended(monkeypatch, capsys, *arguments, code=code).out


def refusal(monkeypatch, capsys, *arguments):
    """The one line that is printed, after the one that says that ranks are started where only they can know."""
    out, err = ended(monkeypatch, capsys, *arguments, code=2)
    assert out == ""
    lines = err.strip().splitlines()
    assert lines[-1].startswith("ringspan: "), err
    assert not lines[:-1] or re.fullmatch(r"starting \d ranks?", *lines[:-1]), err
    return lines[-1]


@refusals("train")
def test_train_refuses(monkeypatch, capsys, workplace, arguments, message):
    assert message in refusal(
        monkeypatch, capsys, "train", workplace / "config.toml", *arguments
    )
    assert sorted(path.name for path in workplace.iterdir()) == ["config.toml", "text"]


def test_train_refuses_a_missing_file(monkeypatch, capsys, tmp_path):
    assert "no.toml" in refusal(monkeypatch, capsys, "train", tmp_path / "no.toml")
    assert list(tmp_path.iterdir()) == []


EARLY = """
import os, sys
from ringspan.cli.main import main
from tests.cases import refusals
from tests.train.runs import training_file

config, folder = sys.argv[1:]
finished = os.path.join(folder, "finished")
os.makedirs(os.path.join(finished, "checkpoints", "step_00000001"))
os.mkdir(os.path.join(finished, "model"))
open(os.path.join(finished, "exported"), "w").write("1")
cases = [
    ([], {"WORLD_SIZE": "2"}),
    (["data.paths=nowhere"], {}),
    (["data.paths=/dev/zero"], {}),
    (["data.extensions=['.xyz']"], {}),
    ([f"run={config}"], {}),
    ([f"run={finished}"], {}),
    (["optimizer.nonsense=1"], {}),
    (["mesh.ring=3", "--nproc", "2"], {}),
]
for arguments, environment in cases:
    os.environ.update(environment)
    sys.argv = ["ringspan", "train", config, *arguments]
    try:
        main()
    except SystemExit as exit_:
        print(exit_.code)
    for name in environment:
        del os.environ[name]
print("torch" in sys.modules or "transformers" in sys.modules)
"""


def test_train_refuses_bad_input_without_importing_a_framework(workplace):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE")
    }
    program = [
        sys.executable,
        "-c",
        EARLY,
        str(workplace / "config.toml"),
        str(workplace),
    ]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.split() == 8 * ["2"] + ["False"], done
    lines = done.stderr.splitlines()
    for line, message in zip(
        lines,
        [
            "WORLD_SIZE is set in the environment, and RANK, MASTER_ADDR, MASTER_PORT not",
            'data.paths = "nowhere": does not exist',
            'data.paths = "/dev/zero": is no file that can be read twice',
            "no file in it ends in .xyz",
            "cannot be the folder of a run",
            "is finished at step 1; set steps above 1 to go on",
            "optimizer.nonsense: unknown key",
            "mesh.ring = 3",
        ],
        strict=True,
    ):
        assert line.startswith("ringspan: ") and message in line


def test_what_only_a_rank_can_see_is_refused_too(monkeypatch, capsys, workplace):
    (workplace / "text" / "a.txt").write_text("too short")
    assert "needs 46 tokens" in refusal(
        monkeypatch, capsys, "train", workplace / "config.toml", "--nproc", "2"
    )
    assert not (workplace / "run").exists()


def test_a_run_is_never_overwritten(monkeypatch, capsys, workplace):
    (workplace / "run").mkdir()
    (workplace / "run" / "metrics.jsonl").write_text("precious")
    assert "already holds a run" in refusal(
        monkeypatch, capsys, "train", workplace / "config.toml"
    )
    assert (workplace / "run" / "metrics.jsonl").read_text() == "precious"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("{folder}/config.toml", "config.toml is a file"),
        ("{folder}/config.toml/run", "config.toml is a file"),
        ("{folder}/" + 300 * "x", "File name too long"),
        pytest.param(
            "/proc/run",
            "/proc",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="not Linux"),
        ),
    ],
    ids=["a file", "in a file", "too long", "not to be written"],
)
def test_a_folder_that_cannot_be_made_is_refused(
    monkeypatch, capsys, workplace, run, message
):
    line = refusal(
        monkeypatch,
        capsys,
        "train",
        workplace / "config.toml",
        f"run={run.format(folder=workplace)}",
    )
    assert "cannot be the folder of a run" in line and message in line
    assert sorted(path.name for path in workplace.iterdir()) == ["config.toml", "text"]


@refusals("bench")
def test_bench_refuses(monkeypatch, capsys, arguments, message):
    assert message in refusal(monkeypatch, capsys, "bench", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "--out", "{}/config.toml"],
        ["demo", "--run", "{}/config.toml/run"],
        ["init", "{}/text"],
    ],
    ids=["profile", "demo", "init"],
)
def test_a_place_that_cannot_be_written_is_refused_at_once(
    monkeypatch, capsys, workplace, arguments
):
    said = refusal(
        monkeypatch, capsys, *(argument.format(workplace) for argument in arguments)
    )
    assert (
        "config.toml is a file" in said
        or "is a folder; give the name of a file in it" in said
    )


COMMANDS = (
    "train",
    "demo",
    "bench",
    "plan",
    "profile",
    "doctor",
    "rehearse",
    "export",
    "generate",
    "eval",
)


@pytest.mark.parametrize(
    "command",
    [
        [],
        *([name] for name in COMMANDS),
        *(["bench", name] for name in ("attention", "ring", "step")),
    ],
)
def test_help_is_there_with_an_example(monkeypatch, capsys, command):
    said = printed(monkeypatch, capsys, *command, "--help")
    assert "Usage" in said and ("Example" in said or command in ([], ["bench"]))


@pytest.mark.parametrize("command", ["doctor", "profile"])
def test_ranks_are_not_started_under_torchrun(monkeypatch, capsys, command):
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
    ):
        monkeypatch.setenv(name, value)
    assert "under torchrun" in refusal(monkeypatch, capsys, command, "--ranks", "2")


@pytest.mark.parametrize("command", [["nosuch"], ["bench", "nosuch"]])
def test_an_unknown_command_is_refused(monkeypatch, capsys, command):
    assert "nosuch" in refusal(monkeypatch, capsys, *command)
