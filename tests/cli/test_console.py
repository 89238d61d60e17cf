"""What all commands share: an interrupt ends in one line, and ``--json`` has standard output for itself."""

import errno
import io
import json
import os
import runpy
import subprocess
import sys
from unittest import mock

import pytest
from rich.console import Console

import ringspan
from ringspan.cli.console import console, paragraph, working
from ringspan.cli.main import main
from ringspan.core.errors import RankLost
from ringspan.measure.bench import one_process
from ringspan.measure.cluster import doctor
from ringspan.measure.trace import rehearsal
from ringspan.plan import planner
from ringspan.torch.runtime import launch
from ringspan.train.config.load import load_config
from tests.cases import long
from tests.cli.test_bad_input import ended, printed, refusal
from tests.surface import MODEL


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        (planner, "make_plan", ["plan"]),
        (
            rehearsal,
            "rehearse_plan",
            [
                "rehearse",
                "--devices",
                "512",
                "--model",
                "qwen3-0.6b",
                "--length",
                "4096",
            ],
        ),
        (doctor, "examine", ["doctor"]),
        (launch, "launch", ["profile", "--length", "64"]),
        (one_process, "run_attention", ["bench", "attention"]),
    ],
    ids=["plan", "rehearse", "doctor", "profile", "bench"],
)
@pytest.mark.parametrize("json_option", [[], ["--json"]], ids=["text", "json"])
def test_an_interrupt_ends_in_one_line(
    monkeypatch, capsys, module, name, arguments, json_option
):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupted)
    out, err = ended(monkeypatch, capsys, *arguments, *json_option, code=130)
    assert (
        out == ""
        and err.splitlines()[-1] == "ringspan: interrupted"
        and "Traceback" not in err
    )


def shown(capsys, monkeypatch, columns, show):
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv(
        "COLUMNS", raising=False
    )
    show(console())
    return capsys.readouterr().out.splitlines()


def test_text_wraps_between_words_and_below_itself(capsys, monkeypatch):
    words = " ".join(["a-hyphenated-word"] * 9)
    lines = shown(
        capsys, monkeypatch, "60", lambda out: paragraph(out, words, first="- ")
    )
    assert (
        lines
        == ["- a-hyphenated-word a-hyphenated-word a-hyphenated-word"]
        + ["  a-hyphenated-word a-hyphenated-word a-hyphenated-word"] * 2
    )
    for columns in ("", "0", "wide"):  # a file, and what is no width
        assert shown(
            capsys, monkeypatch, columns, lambda out: paragraph(out, words, first="- ")
        ) == [f"- {words}"]


def test_a_number_and_its_unit_stay_together(capsys, monkeypatch):
    text = "x" * 35 + " 80.0 GB and 4,096 tokens"
    assert shown(capsys, monkeypatch, "40", lambda out: paragraph(out, text)) == [
        "x" * 35,
        "80.0 GB and 4,096 tokens",
    ]
    assert shown(capsys, monkeypatch, "24", lambda out: paragraph(out, text[36:])) == [
        "80.0 GB and 4,096 tokens"
    ]
    assert shown(capsys, monkeypatch, "23", lambda out: paragraph(out, text[36:])) == [
        "80.0 GB and",
        "4,096 tokens",
    ]


def test_json_has_standard_output_for_itself(capsys, monkeypatch):
    out, err = ended(monkeypatch, capsys, "plan", "--json", "--device", "a100", code=0)
    assert err == "" and len(out.splitlines()) == 1
    assert "is taken as" in json.loads(out)["reasons"][-1]


def started(*arguments, **options):
    """The command in a process of its own: code and what it says on the standard error stream."""
    program = [sys.executable, "-m", "ringspan", *arguments]
    done = subprocess.run(
        program, stderr=subprocess.PIPE, text=True, timeout=60, **options
    )
    return done.returncode, done.stderr


def test_output_that_cannot_be_written_ends_in_one_line():
    with open("/dev/full", "w") as full:
        code, said = started("plan", stdout=full)
    line = (
        "ringspan: the output cannot be written: No space left on device; make room\n"
    )
    assert (code, said) == (2, line)


@pytest.mark.parametrize(
    "arguments",
    [*long(["plan", "--json"]), ["plan"], *long(["plan", "--help"])],
    ids=" ".join,
)
def test_who_reads_no_more_is_told_nothing(arguments):
    inbox, outbox = os.pipe()
    os.close(inbox)
    try:
        assert started(*arguments, stdout=outbox) == (141, "")
    finally:
        os.close(outbox)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "a/b"),
            2,
            "a/b: Permission denied; name another place",
        ),
        # of a socket: both streams are read
        (
            BrokenPipeError(errno.EPIPE, "Broken pipe"),
            1,
            "Broken pipe",
        ),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), 1, "reset by peer"),
        (RankLost("rank 1 failed: killed by SIGKILL", 77), 77, "rank 1 failed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_command_that_fails_ends_in_one_line(monkeypatch, capsys, error, code, said):
    monkeypatch.setattr(planner, "make_plan", mock.Mock(side_effect=error))
    out, err = ended(monkeypatch, capsys, "plan", code=code)
    assert (out, err.count("\n")) == ("", 1) and said in err


def test_a_terminal_of_another_encoding_shows_what_it_can(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(
        planner,
        "make_plan",
        lambda question: print("clocks apart ±1 ms") or sys.exit(0),
    )
    monkeypatch.setattr(sys, "argv", ["ringspan", "plan"])
    with pytest.raises(SystemExit):
        main()
    sys.stdout.flush()
    assert written.getvalue() == b"clocks apart ?1 ms\n"


def test_an_interrupt_while_importing_the_command_ends_in_a_line(monkeypatch, capsys):
    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == "ringspan.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "ringspan.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("ringspan", run_name="__main__")
    assert exit_.value.code == 130
    assert capsys.readouterr().err == "ringspan: interrupted\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_status_on_a_terminal_and_lines_elsewhere(
    monkeypatch, capsys, is_terminal
):
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    with working() as doing:
        doing("a [b]")
    said = capsys.readouterr().err
    assert (said == "a [b]\n") == (not is_terminal)


@pytest.mark.long
def test_a_rehearsal_says_in_a_pipe_what_it_does(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    options = [
        "rehearse",
        "--devices",
        "2",
        "--model",
        str(tmp_path),
        "--length",
        "128",
        "--json",
    ]
    out, err = ended(monkeypatch, capsys, *options, code=0)
    assert len(out.splitlines()) == 1
    assert err.startswith(
        "rehearsing rank 0: building the model\nmemory: step 1 of 2\n"
    )


def test_a_rank_that_is_profiled_says_what_it_does(monkeypatch, capsys):
    def launched(function, ranks, *args):
        args[-1]("step 1 of 3")
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "launch", launched)
    said = ended(
        monkeypatch,
        capsys,
        "profile",
        "--model",
        "qwen3-0.6b",
        "--length",
        "64",
        code=130,
    ).err
    assert said == "starting 2 ranks\nstep 1 of 3\nringspan: interrupted\n"


@pytest.mark.parametrize(
    ("handler", "ends"), [("default_int_handler", True), ("SIG_IGN", False)]
)
def test_an_interrupt_while_importing_libraries_ends_at_once(handler, ends):
    """Whatever catches the exception that it would be; never where interrupts are ignored, as in the background."""
    code = (
        f"import os, signal\nsignal.signal(signal.SIGINT, signal.{handler})\n"
        "from ringspan.cli.console import importing\nwith importing(): pass\n"
        "try: os.kill(os.getpid(), signal.SIGINT); print('ignored', flush=True)\n"
        "except KeyboardInterrupt: print('as before', flush=True)\n"
        "with importing():\n"
        "    try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    except BaseException: print('goes on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    expected = (
        (130, "as before\n", "ringspan: interrupted\n")
        if ends
        else (0, "ignored\n", "")
    )
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_init_writes_a_file_that_loads_and_replaces_none(monkeypatch, capsys, tmp_path):
    file = tmp_path / "mine.toml"
    assert f"ringspan train {file}" in printed(monkeypatch, capsys, "init", file)
    assert load_config(file).data.paths == ("data",)
    file.write_text("precious")
    assert "--force" in refusal(monkeypatch, capsys, "init", file)
    assert file.read_text() == "precious"
    printed(monkeypatch, capsys, "init", file, "--force")
    load_config(file)
    assert "cannot be written" in refusal(
        monkeypatch, capsys, "init", tmp_path / "no" / "mine.toml"
    )


def test_the_version(monkeypatch, capsys):
    assert (
        printed(monkeypatch, capsys, "--version")
        == f"ringspan {ringspan.__version__}\n"
    )
