"""The table of releases: what is kept of a run, and what is said of a release that nobody tried."""

import json

import pytest

from tests import versions

REPORT = """<testsuites><testsuite tests="4" skipped="1">
<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two"><failure/></testcase>
<testcase classname="tests.b" name="three"><error/></testcase>
<testcase classname="tests.b" name="four"><skipped/></testcase>
</testsuite></testsuites>"""
ROW = {
    "torch": "2.15.0+cu132",
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "python": "3.11.7",
    "tests": ["tests/hf"],
}


def test_a_report_is_counted(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    expected = {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests.a::two", "tests.b::three"],
    }
    assert versions.counts(path) == expected


def test_a_later_run_takes_the_place_of_the_same_one(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "RESULT", tmp_path / "versions.json")
    older = ROW | {"torch": "2.9.1"}
    for row in (
        older,
        ROW | {"failed": 1},
        ROW | {"failed": 0},
        ROW | {"tests": ["tests/lightning"], "failed": 0},
    ):
        versions.keep(row)
    rows = json.loads(versions.RESULT.read_text())["rows"]
    assert [(row["torch"], row["tests"][0], row.get("failed")) for row in rows] == [
        ("2.15.0+cu132", "tests/lightning", 0),
        ("2.15.0+cu132", "tests/hf", 0),
        ("2.9.1", "tests/hf", None),
    ]


@pytest.mark.parametrize(
    ("newest", "said"),
    [
        ({"torch": "2.15.1", "transformers": "5.24.0", "trl": "1.16.3"}, ""),
        (
            {"torch": "2.16.0", "transformers": "5.24.0", "trl": "1.16.0"},
            "warning: torch 2.16.0 is in the registry and was never tried: run make unpinned\n",
        ),
        (
            {"torch": "2.15.0", "transformers": "5.24.0"},
            "warning: the registry was not asked for trl\n",
        ),
    ],
)
def test_a_release_that_nobody_tried_is_named(
    monkeypatch, tmp_path, capsys, newest, said
):
    monkeypatch.setattr(versions, "RESULT", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "_newest", newest.get)
    versions.keep(ROW)
    assert versions.check() == 0
    assert capsys.readouterr().out == said


def test_oldest_and_newest_supported_releases_of_torch_were_run():
    rows = json.loads(versions.RESULT.read_text())["rows"]
    minors = {
        tuple(versions._numbers(row["torch"])[:2]) for row in rows if not row["failed"]
    }
    assert {(2, 11), (2, 15)} <= minors
