"""Every command of a page parses, and runs here in a short form or says in a table why not."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from ringspan.cli.main import app
from tests.docs.commands import TABLE, Command, arguments, commands, reader
from tests.docs.pages import ROOT, pages, without_blocks

ALL = list(commands())
RUN = {
    shlex.join(arguments(each)): each
    for each in reversed(ALL)
    if each.row and not each.row.why_not
}
QUICK = {line: each for line, each in RUN.items() if each.row and each.row.quick}
LONG = {line: each for line, each in RUN.items() if line not in QUICK}


def test_every_command_is_run_or_says_why_not():
    assert len(ALL) > 70
    assert [command for command in ALL if command.row is None] == []
    used = {command.row.start for command in ALL if command.row}
    assert [row.start for row in TABLE if row.start not in used] == []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    reader(made)
    return made


def ran(command: Command, home: Path, folder: Path) -> str:
    """What a command printed, with a copy of the reader's folder as the current one."""
    row = command.row
    assert row is not None
    here = shutil.copytree(home, folder / "here", symlinks=True)
    if row.start == "ringspan init":
        (here / "train.toml").unlink()
    for before in row.first:
        printed(Command(command.place, before), here)
    found, words = printed(command, here), arguments(command)
    for option in ("--picture", "--page", "--out"):
        if option in words:
            assert (here / words[words.index(option) + 1]).stat().st_size > 0, option
    if "--json" in words:
        assert isinstance(json.loads(found), dict)
    return found


def printed(command: Command, here: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.environ.get("PYTHONPATH", f"{ROOT}/src"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        arguments(command),
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, (
        f"{command.place}: {command.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout


@pytest.mark.parametrize("line", QUICK, ids=[each.place for each in QUICK.values()])
def test_a_quick_command_runs(home: Path, tmp_path: Path, line: str):
    assert ran(QUICK[line], home, tmp_path)


@pytest.mark.skipif(
    "RINGSPAN_DOCS" not in os.environ, reason="minutes; make docs-check"
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("line", LONG, ids=[each.place for each in LONG.values()])
def test_a_command_runs(home: Path, tmp_path: Path, line: str):
    ran(LONG[line], home, tmp_path)


def problem(arguments: list[str]) -> str | None:
    """What is wrong with a command line, which is parsed and not run."""
    command, name = typer.main.get_command(app), "ringspan"
    context = None
    while True:
        try:
            context = command.make_context(name, list(arguments), parent=context)
        except SystemExit:
            return None  # --help
        except Exception as error:
            if type(error).__name__ == "Exit":
                return None
            return f"{name}: {getattr(error, 'message', error)}"
        below = getattr(command, "commands", None)
        if below is None:
            return None
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not rest or rest[0] not in below:
            return f"{name} has no command {rest[:1]}"
        name, arguments = rest[0], rest[1:]
        command = below[name]


def test_every_command_of_ringspan_parses():
    found = [(each.place, shlex.split(each.program)) for each in ALL]
    found = [(place, words[1:]) for place, words in found if words[0] == "ringspan"]
    assert len(found) > 40
    assert [
        (place, words, why) for place, words in found if (why := problem(words))
    ] == []


def missing(command: str) -> str | None:
    """What a command in a sentence names and is not there: a target, a module, a file, an option of ``ringspan``."""
    match shlex.split(command):
        case ["make", target, *_]:
            return (
                None
                if re.search(
                    rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE
                )
                else target
            )
        case ["python", "-m", module, *_]:
            return None if importlib.util.find_spec(module) else module
        case ["python" | "pytest", *files]:
            return next(
                (
                    each
                    for each in files
                    if each.endswith(".py") and not (ROOT / each).is_file()
                ),
                None,
            )
        case ["ringspan", *words]:
            here = typer.main.get_command(app)
            while words and words[0] in getattr(here, "commands", {}):
                here = here.commands[words.pop(0)]  # pyright: ignore[reportAttributeAccessIssue]
            if hasattr(here, "commands") and words[:1] not in (
                [],
                ["COMMAND"],
                ["--version"],
            ):
                return words[0]
            options = {option for parameter in here.params for option in parameter.opts}
            return next(
                (
                    word
                    for word in words
                    if word.startswith("--") and word not in {"--help", *options}
                ),
                None,
            )
    return None


def test_what_a_command_in_a_sentence_names_is_there():
    found = {
        (page.name, code)
        for page in pages()
        for code in re.findall(
            r"`((?:ringspan|make|python|pytest) [^`\n]+)`", without_blocks(page)
        )
    }
    assert len(found) > 80
    assert [
        (page, code, what) for page, code in sorted(found) if (what := missing(code))
    ] == []
