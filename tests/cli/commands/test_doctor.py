"""``ringspan doctor``: its object, its tables, its exit codes."""

import json

import pytest

from ringspan.core.errors import UnsupportedError
from ringspan.measure.cluster import doctor
from ringspan.proof.run import Proof, Row
from tests.cases import refusals
from tests.cli.test_bad_input import printed, refusal
from tests.surface import check_object


def check(result, ranks):
    keys = "devices backends kernels flops bandwidth_bytes_per_second min_block_tokens problems"
    assert set(keys.split()) <= result.keys()
    assert result["min_block_tokens"] == round(
        result["flops"] / result["bandwidth_bytes_per_second"]
    )
    assert all(
        {"available", "serves", "why_not"} == kernel.keys()
        for kernel in result["kernels"].values()
    )
    assert (
        len(result["cluster"]["ranks"]) == ranks
        and result["cluster"]["ring_error"] < 1e-6
    )
    assert result["backends"]["gloo"] and result["can_train"]


def test_it_prints_one_object(monkeypatch, capsys):
    result = json.loads(
        printed(monkeypatch, capsys, "doctor", "--ranks", "2", "--json")
    )
    check(result, 2)
    check_object("doctor", result)
    listens = [
        address for rank in result["cluster"]["ranks"] for address in rank["listens"]
    ]
    assert all(address.startswith("127.0.0.1:") for address in listens), (
        "local ranks listen on loopback alone"
    )


RESULT = {
    "versions": {"python": "3.11.7", "nccl": None},
    "devices": [
        {"kind": "cpu", "name": "a processor", "cores": 2, "memory_bytes": 8 << 30}
    ],
    "backends": {"gloo": True, "nccl": False},
    "kernels": {
        "cpu": {
            "available": True,
            "serves": {"causal": 1.0, "window": 0.6},
            "why_not": None,
        }
    },
    "measured_flops": [{"what": "attention", "dtype": "bfloat16", "flops": 2e12}],
    "bandwidth_bytes_per_second": None,
    "min_block_tokens": None,
    "cluster": None,
    "trial": {"error": 1e-7, "seconds": 2.5, "failure": None, "failed_at": None},
    "launch_seconds": 2.1e-3,
    "missing": [
        {"name": "torchao", "needed_for": "8 bits", "remedy": "pip install torchao"}
    ],
    "problems": [{"what": "torch is [old]", "remedy": "renew it", "stops": True}],
    "can_train": False,
}


def test_people_see_what_stops_and_the_exit_code_says_so(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda ranks, doing: RESULT)
    text = printed(monkeypatch, capsys, "doctor", code=1)
    for expected in (
        "a processor",
        "window 60%",
        "the host: 2.1 ms for each pass of a layer",
        "! torch is [old]; renew it",
        "cannot train",
        "pip install torchao",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("error", "code", "said"), [(1e-12, 0, "exact, in"), (1e-3, 1, "differs: one")]
)
def test_a_model_is_proven_too(monkeypatch, capsys, error, code, said):
    fine = RESULT | {"can_train": True, "problems": []}
    monkeypatch.setattr(doctor, "examine", lambda ranks, doing: fine)
    proof = Proof("a model", 2, 1000, {"ring": 2}, {}, [Row("one", error, "the loss")])
    place = "ringspan.cli.commands.prove.on_ranks"
    monkeypatch.setattr(place, lambda *_, **__: (proof, True))
    arguments = "doctor", "--model", "llama-3.1-8b"
    assert said in printed(monkeypatch, capsys, *arguments, code=code)
    text = printed(monkeypatch, capsys, *arguments, "--json", code=code)
    assert json.loads(text)["proof"]["exact"] == (code == 0)


def test_a_model_that_is_refused_is_a_finding(monkeypatch, capsys):
    fine = RESULT | {"can_train": True, "problems": []}
    monkeypatch.setattr(doctor, "examine", lambda ranks, doing: fine)

    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedError("it has attention dropout; set it to 0")

    monkeypatch.setattr("ringspan.cli.commands.prove.on_ranks", refuse)
    arguments = "doctor", "--model", "llama-3.1-8b"
    text = printed(monkeypatch, capsys, *arguments, code=1)
    assert "not proven: it has attention dropout; set it to 0" in text


def test_people_are_told_once_that_there_is_no_cuda(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    no_cuda = {
        "available": False,
        "serves": {},
        "why_not": "it needs a CUDA device, and this machine has none",
    }
    missing = {"available": False, "serves": {}, "why_not": "it is not installed"}
    kernels = (
        RESULT["kernels"]
        | dict.fromkeys(("cudnn", "flash", "triton"), no_cuda)
        | {"flash3": missing}
    )
    monkeypatch.setattr(
        doctor, "examine", lambda ranks, doing: RESULT | {"kernels": kernels}
    )
    text = printed(monkeypatch, capsys, "doctor", code=1)
    assert text.count("CUDA") == 1
    assert (
        "not here: cudnn, flash, triton: it needs a CUDA device, and this machine has none"
        in text
    )
    assert "not here: flash3: it is not installed" in text


@refusals("doctor")
def test_bad_input_is_refused(monkeypatch, capsys, arguments, message):
    assert message in refusal(monkeypatch, capsys, "doctor", *arguments)


def test_a_clock_that_is_hardly_apart_is_not_minus_zero_apart(monkeypatch, capsys):
    rank = {"host": "a", "device": "cpu", "listens": []}
    cluster = {"ranks": [rank, rank], "links": [], "ring_error": 1e-7}
    cluster |= {"clock_offset_seconds": [0.0, -3e-4], "clock_uncertainty_seconds": 0.0}
    monkeypatch.setattr(
        doctor, "examine", lambda ranks, doing: RESULT | {"cluster": cluster}
    )
    text = printed(monkeypatch, capsys, "doctor", code=1)
    assert text.count("+0 ") == 2 and "-0 " not in text
    assert "losses differ from one process by 1.0e-07, 2.5 s" in " ".join(text.split())


def watched(run, *windows):
    """A run's file of its ranks' speed."""
    lines = [{"hosts": ["a", "b"]}, *windows]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "speed.jsonl").write_text(text + '{"step": 1')


def test_watch_shows_and_draws_the_ranks_of_a_run(monkeypatch, capsys, tmp_path):
    window = {"step_seconds": 1.0, "wait_seconds": [0.2, 0.0]}
    named = "rank 1 (b) computes 2.0 times as long as the median since step 1"
    watched(
        tmp_path,
        {"step": 5, "compute_seconds": [0.2, 0.2], "lines": []} | window,
        {
            "step": 10,
            "compute_seconds": [0.2, 0.4],
            "links": [[0, 1, 0.01], [1, 0, 0.625]],
            "lines": [named],
        }
        | window,
    )
    text = printed(monkeypatch, capsys, "doctor", "--watch", str(tmp_path))
    assert "step 10, of 1 s" in text and "0.4" in text
    assert text.index("0.625") < text.index("0.01")
    assert named in " ".join(text.split())
    assert "rank 1 (b)" in (tmp_path / "speed.svg").read_text()


def test_watch_refuses_a_folder_without_the_file(monkeypatch, capsys, tmp_path):
    said = refusal(monkeypatch, capsys, "doctor", "--watch", str(tmp_path))
    assert "give the folder of a run with watch_speed=true" in said
    watched(tmp_path)
    said = refusal(monkeypatch, capsys, "doctor", "--watch", str(tmp_path))
    assert "try again after a few steps" in said
    said = refusal(
        monkeypatch, capsys, "doctor", "--watch", str(tmp_path), "--ranks", "2"
    )
    assert "--ranks does not go with --watch" in said
