"""Every planted bug is caught by the test that is named for it: the tests bite."""

import json
import re
import subprocess
import sys

import pytest

from tests.mutants.change import ROOT, SOURCE
from tests.mutants.mutants import BUGS, MUTANTS, chosen


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Run the mutants in one process that imports torch once and forks for each: name -> pytest's exit code; those of
    the sound code below names that are numbers.
    """
    work = tmp_path_factory.mktemp("mutants")
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants.run", str(work)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2400,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((work / "verdicts.json").read_text())


@pytest.mark.seeded
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "mutant", chosen(), ids=lambda mutant: mutant.name.replace(" ", "-")
)
def test_a_seeded_bug_is_caught(verdicts, mutant):
    assert verdicts[mutant.name] == 1, f"{mutant.test} did not notice: {mutant.name}"


@pytest.mark.seeded
def test_without_a_bug_the_same_tests_pass_in_the_same_way(verdicts):
    assert {
        name: code for name, code in verdicts.items() if name.isdecimal() and code
    } == {}


def test_each_seeded_bug_fits_the_code_and_a_test():
    counts = {
        mutant.name: len(mutant.places((SOURCE / mutant.file).read_text()))
        for mutant in MUTANTS
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert len(counts) == len(re.findall(r"^  \w", BUGS, re.MULTILINE)), (
        "a name occurs twice, or a bug cannot be read"
    )
    for test in {mutant.test for mutant in MUTANTS}:
        file, _, name = test.partition("::")
        assert (
            f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()
        ), test


def test_each_invariant_has_a_bug():
    table = (
        (ROOT / "tests" / "README.md")
        .read_text()
        .partition("| invariant |")[2]
        .partition("\n\n")[0]
    )
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    invariants = {
        invariant.removeprefix("| ") for invariant, level, _ in rows if level != "text"
    }
    assert invariants - {mutant.invariant for mutant in MUTANTS} == set()
