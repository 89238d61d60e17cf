"""Every seeded bug is caught by the test that is named for it: the tests bite."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.mutants.change import ROOT, SOURCE
from tests.mutants.mutants import MUTANTS, chosen


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Run the mutants in one process that imports torch once and forks for each: name -> pytest's exit code; that of
    the sound code under "".
    """
    work = tmp_path_factory.mktemp("mutants")
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants.run", str(work)], cwd=ROOT, capture_output=True, text=True, timeout=2400
    )
    assert done.returncode == 0, done.stderr
    yield json.loads((work / "verdicts.json").read_text())
    shutil.rmtree(work)


@pytest.mark.seeded
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mutant", chosen(), ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_seeded_bug_is_caught(verdicts, mutant):
    assert verdicts[mutant.name] == 1, f"{mutant.test} did not notice: {mutant.name}"


@pytest.mark.seeded
def test_without_a_bug_the_same_tests_pass_in_the_same_way(verdicts):
    assert verdicts[""] == 0


def test_each_seeded_bug_fits_the_code():
    counts = {mutant.name: (SOURCE / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_mutants_are_distinct():
    assert len({(mutant.file, mutant.old, mutant.new, mutant.test) for mutant in MUTANTS}) == len(MUTANTS)
