"""``ringspan prove``: its object, its tables, its exit codes."""

import json
from typing import Any

import pytest

from ringspan.proof.run import Proof, Row
from tests.cases import refusals
from tests.cli.test_bad_input import ended, printed, refusal
from tests.proof.remote import write_remote
from tests.surface import check_object


def test_it_prints_one_object_of_a_model_that_is_exact(monkeypatch, capsys):
    text = printed(
        monkeypatch, capsys, "prove", "--model", "llama-3.1-8b", "--ranks", "2",
        "attention.layout=striped", "--json",
    )  # fmt: skip
    result = json.loads(text)
    check_object("prove", result)
    assert result["exact"] and result["options"] == {"layout": "striped"}
    assert result["mesh"]["ring"] == 2
    assert all(row["error"] < row["bound"] for row in result["rows"])
    assert [row["batch"] for row in result["rows"]][-1] == "generation"


def proof_of(*rows: Row, **others):
    mesh, options = {"replicate": 1, "ring": 2}, {"layout": "striped"}
    return Proof("a model", 2, 1000, mesh, options, [*rows], **others)


def test_people_see_the_place_and_the_exit_code_says_so(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    where = "the output of layers.1, in row 0"
    wrong = Row("one sequence", 0.3, "the loss", place=where)
    refused = Row("generation", refused="it does not write")
    proof = proof_of(wrong, refused, smallest={"comm_dtype": "int8"})
    place = "ringspan.cli.commands.prove.on_ranks"
    monkeypatch.setattr(place, lambda *_, **__: (proof, True))
    out = ended(monkeypatch, capsys, "prove", "--model", "llama-3.1-8b", code=1).out
    for expected in (
        "striped",
        "3.0e-01",
        "1e-09",
        "refused: it does not write",
        "differs: one sequence, first at the output of layers.1, in row 0",
        "comm_dtype=int8",
        "not tried: the model's full size",
    ):
        assert expected in out


def test_a_page_is_written_only_where_it_is_asked_for(monkeypatch, capsys, tmp_path):
    proof = proof_of(Row("one sequence", 1e-12, "the loss"))
    place = "ringspan.cli.commands.prove.on_ranks"
    monkeypatch.setattr(place, lambda *_, **__: (proof, True))
    arguments = "prove", "--model", "llama-3.1-8b"
    printed(monkeypatch, capsys, *arguments)
    assert list(tmp_path.iterdir()) == []
    printed(monkeypatch, capsys, *arguments, "--report", tmp_path)
    assert "one sequence" in (tmp_path / "proof.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("error", "exact"), [(1e-12, True), (1e-3, False)])
def test_what_is_refused_is_no_difference(error, exact):
    proof = proof_of(Row("one", error), Row("two", refused="not this"))
    assert proof.is_exact == exact


def test_python_files_run_only_with_leave(monkeypatch, capsys, tmp_path):
    folder = write_remote(tmp_path / "gated")
    message = refusal(monkeypatch, capsys, "prove", "--model", folder)
    assert "model.trust_remote_code = true" in message


def test_settings_and_options_arrive(monkeypatch, capsys, tmp_path):
    given = []
    proof = proof_of(Row("one", 1e-12))
    place = "ringspan.cli.commands.prove.on_ranks"

    def on_ranks(_: object, arguments: Any, *__: object, **___: object) -> Any:
        given.append(arguments())
        return proof, True

    monkeypatch.setattr(place, on_ranks)
    folder = write_remote(tmp_path / "gated")
    ended(
        monkeypatch, capsys, "prove", "--model", folder, "--dtype", "bfloat16",
        "--adapter", "8", "model.trust_remote_code=true", "optimizer.z_loss=1e-4",
        code=0,
    )  # fmt: skip
    ((named, step, dtype, adapter, weights),) = given
    assert named is None and step.settings.model.path == str(folder)
    assert step.settings.adapter.rank == 8 and adapter == ""
    assert step.options == {"z_loss": 1e-4} and dtype == "bfloat16"
    assert weights is None


def test_packed_weights_of_a_config_go_to_the_proof(monkeypatch, capsys, tmp_path):
    values = {"model_type": "llama", "quantization_config": {"load_in_4bit": True}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    message = refusal(monkeypatch, capsys, "prove", "--model", path, "--ranks", "1")
    assert "packed weights do not train; add an adapter" in message


@refusals("prove")
def test_bad_input_is_refused_in_one_line(monkeypatch, capsys, arguments, message):
    assert message in refusal(monkeypatch, capsys, "prove", *arguments)
