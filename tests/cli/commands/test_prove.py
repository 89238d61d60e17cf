"""``ringspan prove``: its object, its tables, its exit codes."""

import json

import pytest

from ringspan.proof.run import Proof, Row
from tests.cases import refusals
from tests.cli.test_bad_input import ended, printed, refusal
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


@pytest.mark.parametrize(("error", "exact"), [(1e-12, True), (1e-3, False)])
def test_what_is_refused_is_no_difference(error, exact):
    proof = proof_of(Row("one", error), Row("two", refused="not this"))
    assert proof.is_exact == exact


@refusals("prove")
def test_bad_input_is_refused_in_one_line(monkeypatch, capsys, arguments, message):
    assert message in refusal(monkeypatch, capsys, "prove", *arguments)
