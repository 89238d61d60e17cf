"""The one script for a machine with a GPU, in its dry run: each row is kept, and a failure loses nothing else."""

import json

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import session
from benchmarks.gpu.documents import documents
from benchmarks.gpu.rows import ROWS
from tests.cases import long


@pytest.mark.long
def test_a_dry_run_keeps_every_row_that_was_asked_for(tmp_path):
    gpu.main(
        [
            "--quick",
            "--rows",
            "ring-documents,kernels-causal-8k-64",
            "--output",
            str(tmp_path),
        ]
    )
    gpu.main(["--quick", "--rows", "facts", "--output", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["machine"]["torch"]
    assert list(found["rows"]) == ["ring-documents", "kernels-causal-8k-64", "facts"]
    assert all(row["result"] and row["seconds"] > 0 for row in found["rows"].values())
    kernels = found["rows"]["kernels-causal-8k-64"]["result"]
    assert (
        kernels["chosen"] in kernels["seconds"]
        and 0 < kernels["fraction_of_fastest"]["forward"] <= 1
    )
    efficiency = found["rows"]["ring-documents"]["result"]["efficiency"]["forward"]
    assert found["summary"]["ring-documents forward"] == {
        "measured": efficiency,
        "at_least": 0.92,
    }


@pytest.mark.long
def test_a_row_of_a_model_has_its_tokens_a_second(tmp_path):
    gpu.main(["--quick", "--rows", "llama-4x32k", "--output", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert (
        json.loads(path.read_text())["rows"]["llama-4x32k"]["result"][
            "tokens_per_second_per_rank"
        ]
        > 0
    )


FIRST = f"echo '{gpu._PREFIX}{{\"result\": 1}}'; "  # of a shell, which starts in no time on a busy machine


@pytest.mark.parametrize(
    ("code", "errors"),
    [
        ("echo no memory >&2; exit 1", [None, "no memory", "no memory"]),
        *long(
            ("echo noise; exec sleep 60", [None, "longer than 2 s", "longer than 2 s"])
        ),
        ("", [None, "it ended with 0", "it ended with 0"]),
    ],
)
def test_a_failing_row_is_reported_and_the_next_runs(monkeypatch, code, errors):
    started = []

    def follow(command, left, end, limit):
        started.append(list(left))
        script = FIRST + code if len(started) == 1 else code
        yield from original(["sh", "-c", script], left, end, limit)

    original = gpu._follow
    monkeypatch.setattr(gpu, "_follow", follow)
    rows = dict(gpu.measure(["a", "b", "c"], True, 60, 2))
    assert list(rows) == ["a", "b", "c"] and started == [["a", "b", "c"], ["c"]]
    for row, error in zip(rows.values(), errors, strict=True):
        assert (
            row == {"result": 1, "seconds": row["seconds"]}
            if error is None
            else error in row["error"]
        )


def test_rows_without_time_are_named():
    rows = dict(gpu.measure(["merge", "facts"], True, 0.0, 60))
    assert (
        all("longer than 0 s" in row["error"] for row in rows.values())
        and len(rows) == 2
    )


def test_a_row_that_raises_leaves_the_others_alone(monkeypatch, capsys):
    def fail(quick):
        raise ValueError("no such kernel")

    monkeypatch.setitem(ROWS, "merge", fail)
    monkeypatch.setitem(ROWS, "facts", lambda quick: {"quick": quick})
    gpu._serve(["merge", "facts"], True)
    lines = [
        json.loads(line.removeprefix(gpu._PREFIX))
        for line in capsys.readouterr().out.splitlines()
    ]
    assert "no such kernel" in lines[0]["error"] and lines[1] == {
        "result": {"quick": True}
    }


def test_it_refuses_politely(tmp_path):
    with pytest.raises(SystemExit, match="no row is called abacus"):
        gpu.main(["--quick", "--rows", "abacus", "--output", str(tmp_path)])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="there is no CUDA device"):
            gpu.main(["--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_documents_fill_the_sequence_around_their_mean():
    lengths = [
        int(length)
        for length in documents(65536, 2048).removeprefix("documents:").split(",")
    ]
    assert (
        sum(lengths) == 65536
        and 1800 < sum(lengths) / len(lengths) < 2300
        and min(lengths) > 0
    )


def test_a_session_follows_its_rules(tmp_path, monkeypatch):
    """Documents that take too long bring the profile forward; tests that fail end it; unmeasured rows are named."""
    taken, codes = [], {"pytest": 0}

    def run(module, *arguments, seconds):
        if module == "benchmarks.gpu":
            name = arguments[arguments.index("--name") + 1]
            taken.append(name.removeprefix("quick-session-"))
            slow = {"device_seconds": {"ring": {"forward": 2e-3, "backward": 1e-3}}}
            rows = {
                row: {"result": slow}
                for row in arguments[1].split(",")
                if row.startswith("ring")
            }
            (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
        return codes.get(module, 0)

    monkeypatch.setattr(session, "_run", run)
    asked = ["--quick", "--output", str(tmp_path), "--steps"]
    session.main([*asked, ",".join(session.STEPS)])
    assert taken == ["ring", "profile", "kernels", "gathered", "steps"]
    rules = json.loads((tmp_path / "quick-session.json").read_text())["verdicts"][
        "ring"
    ]["rules"].values()
    assert list(rules) == [
        "yes",
        "no: look at the profile first",
        "not measured: merge",
    ]
    assert all(name in ROWS for step in session.STEPS.values() for name in step.rows)
    taken.clear()
    codes["pytest"] = 1
    session.main([*asked, "tests,ring"])
    assert not taken
    with pytest.raises(SystemExit, match="no step is called abacus"):
        session.main([*asked, "abacus"])
