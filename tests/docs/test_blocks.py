"""Every block of Python on a page runs, every command parses, every key of a training file exists."""

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from ringspan.cli.main import app
from tests.docs.pages import ROOT, Block, blocks, pages
from tests.docs.running import ELSEWHERE, SETUPS, python_blocks, run_page, save_models
from tests.pool import Pool
from tests.surface import toml_keys

ALL = [block for page in pages() for block in blocks(page)]
COMMANDS = ("text", "", "sh", "bash", "console")
WITH_PYTHON = sorted({block.page.relative_to(ROOT).as_posix() for block in ALL if block.language == "python"})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Two that torchrun might have started."""
    pool = Pool(2, launched=True)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    save_models(made)
    return made


@pytest.mark.skipif("RINGSPAN_DOCS" not in os.environ, reason="a minute; make docs-check")
@pytest.mark.parametrize("page", sorted(SETUPS))
def test_the_python_of_a_page_runs(ranks: Pool, folder: Path, page: str):
    expected = [place for place, _ in python_blocks(page)]
    assert expected, f"{page} has no Python: take it off the list"
    assert ranks.run(run_page, 2, page, str(folder)) == [expected] * 2


def test_every_page_with_python_is_run_here_or_elsewhere():
    missing = [page for page in WITH_PYTHON if page not in SETUPS and python_blocks(page)]
    assert missing == []
    assert [place for place in ELSEWHERE.values() if not (ROOT / place).exists()] == []
    texts = [block.text for block in ALL if block.language == "python"]
    assert [line for line in ELSEWHERE if not any(line in text for text in texts)] == []


def commands(block: Block) -> Iterator[list[str]]:
    """The arguments of each `ringspan` in a block, started by torchrun or not, without pipes and placeholders."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    for line in text.splitlines():
        found = re.match(
            r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:torchrun .*?-m ringspan|\S*python -m ringspan|ringspan) (.*)", line
        )
        if found and not re.match(r"[:|.]", found[1]):
            words = shlex.split(re.sub(r"(\s[|>].*|\s#.*)$", "", found[1]))
            yield [word for word in words if word != "..."]


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


def test_every_command_of_a_page_parses():
    found = [(block.place, arguments) for block in ALL if block.language in COMMANDS for arguments in commands(block)]
    assert len(found) > 40
    wrong = [(place, arguments, why) for place, arguments in found if (why := problem(arguments))]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ringspan plan --devices 8 --batch 4 --json", None),
        ("torchrun --nnodes 2 ... -m ringspan train a.toml steps=3", None),
        ("ringspan plan --device-count 8", "plan: No such option"),
        ("ringspan explain", "ringspan has no command"),
        ("ringspan plan --devices many", "plan: "),
    ],
)
def test_a_stale_command_is_found(line: str, why: str | None):
    (arguments,) = commands(Block(ROOT / "README.md", 1, "", line))
    result = problem(arguments)
    assert result is None if why is None else str(result).startswith(why)


def test_every_key_of_a_training_file_on_a_page_exists():
    from ringspan.train.config.tables import TrainConfig

    known = {name for name, _ in toml_keys(TrainConfig)}
    known |= {name.rsplit(".", 1)[0] for name in known}

    def keys(table: dict, path: str = "") -> Iterator[str]:
        for name, value in table.items():
            full = f"{path}{name}"
            if isinstance(value, dict) and full not in ("model.config", "model.rope"):
                yield from keys(value, f"{full}.")
            else:
                yield full

    found = {
        (block.place, key)
        for block in ALL
        if block.language == "toml" and not block.text.startswith("# not ringspan")
        for key in keys(tomllib.loads(block.text))
    }
    assert found
    assert [(place, key) for place, key in sorted(found) if key not in known] == []
