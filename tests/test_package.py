"""Wheel and sdist have what they should; workflows and forms are well-formed, and do what the Makefile does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.package import ROOT, problems

GITHUB = ROOT / ".github"


def test_wheel_and_sdist_have_what_they_should(tmp_path: Path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert problems(tmp_path) == []


def test_each_step_of_a_workflow_is_a_target_of_the_makefile():
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    steps = [
        step["run"]
        for file in (GITHUB / "workflows").glob("*.yml")
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert len(steps) > 5
    assert [
        step
        for step in steps
        if step.split()[0] != "make" or step.split()[1] not in targets
    ] == []


def test_the_setup_says_each_step_and_the_log_of_one_that_fails(tmp_path: Path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\necho "log of $*"\ncase "$*" in *dev*) exit $FAILS;; esac\n'
    )
    python.chmod(0o755)

    def setup(fails: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "setup", f"PYTHON={sys.executable}"]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "FAILS": fails},
            capture_output=True,
            text=True,
            check=False,
        )

    failed, done = setup("1"), setup("0")
    assert (
        failed.returncode != 0
        and "log of -m pip install -e" in failed.stderr
        and "torch==" not in failed.stderr
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(
        re.fullmatch(r"\d\d:\d\d:\d\d  .* \.\.\. \d+ s", line) for line in lines
    )


def test_workflows_run_the_pythons_that_are_supported():
    jobs = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())["jobs"]
    assert jobs["newest"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


@pytest.mark.parametrize(
    "form",
    sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")),
    ids=lambda form: form.stem,
)
def test_a_form_is_one_that_github_shows(form: Path):
    fields = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert set(fields) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(fields)
    for field in fields["body"]:
        assert field["type"] in (
            "textarea",
            "input",
            "dropdown",
            "checkboxes",
            "markdown",
        )
        assert field["attributes"]["label"]
    assert len({field["id"] for field in fields["body"]}) == len(fields["body"])
