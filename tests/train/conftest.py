"""What the runs of a file read and write."""

from pathlib import Path

import pytest

from tests.train.runs import write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("train"))
