"""Every block of Python on a page runs, and every key of a training file exists."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, pages
from tests.docs.running import ELSEWHERE, SETUPS, python_blocks, run_page, save_models
from tests.pool import Pool
from tests.surface import toml_keys

ALL = [block for page in pages() for block in blocks(page)]
WITH_PYTHON = sorted(
    {
        block.page.relative_to(ROOT).as_posix()
        for block in ALL
        if block.language == "python"
    }
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    pool = Pool(2, launched=True)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    save_models(made)
    return made


@pytest.mark.skipif(
    "RINGSPAN_DOCS" not in os.environ, reason="a minute; make docs-check"
)
@pytest.mark.parametrize(
    "page", sorted(page for page, setup in SETUPS.items() if not setup.alone)
)
def test_the_python_of_a_page_runs(ranks: Pool, folder: Path, page: str):
    expected = [place for place, _ in python_blocks(page)]
    assert expected, f"{page} has no Python: take it off the list"
    assert ranks.run(run_page, 2, page, str(folder)) == [expected] * 2


@pytest.mark.skipif(
    "RINGSPAN_DOCS" not in os.environ, reason="a minute; make docs-check"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", sorted(page for page, setup in SETUPS.items() if setup.alone)
)
def test_the_python_of_a_page_runs_in_a_process_of_its_own(folder: Path, page: str):
    command = [sys.executable, "-m", "tests.docs.running", page, str(folder)]
    # Programs are compiled for long, and run once.
    quickly = {
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**quickly, **os.environ},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [place for place, _ in python_blocks(page)]


def test_every_page_with_python_is_run_here_or_elsewhere():
    missing = [
        page for page in WITH_PYTHON if page not in SETUPS and python_blocks(page)
    ]
    assert missing == []
    assert [place for place in ELSEWHERE.values() if not (ROOT / place).exists()] == []
    texts = [block.text for block in ALL if block.language == "python"]
    assert [line for line in ELSEWHERE if not any(line in text for text in texts)] == []


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
