"""A rank that is killed or stopped while it generates ends the command with its name."""

import re
import subprocess
import sys
import time

import pytest

from tests.cli.commands.test_generate import save_model, save_tokenizer

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("name", "doing", "says"),
    [
        ("SIGKILL", "reading", r"rank 1 (failed: killed by SIGKILL|died at)"),
        ("SIGKILL", "writing", r"rank 0 (failed: killed by SIGKILL|died at)"),
        ("SIGSTOP", "reading", r"no progress for .*: rank 1 .*\(silent, stopped or cut off\)"),
        ("SIGSTOP", "writing", r"no progress for .*: rank 0 .*\(silent, stopped or cut off\)"),
    ],
)
def test_a_rank_that_is_struck_is_named(tmp_path, name, doing, says):
    save_tokenizer(tmp_path)
    save_model(tmp_path)
    started = time.monotonic()
    command = [sys.executable, "-m", "tests.generate.struck", str(tmp_path), name, doing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    assert re.search(says, done.stderr), done.stderr
    assert time.monotonic() - started < 120
