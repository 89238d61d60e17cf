"""Plans of packed documents: each layout's balance, bytes and step."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ringspan.cli.main import app
from ringspan.core.errors import ConfigError
from ringspan.core.geometry.layout import Layout
from ringspan.plan.cluster import hardware
from ringspan.plan.documents import compare_layouts, read_documents
from ringspan.plan.model.configs import model_shape
from ringspan.plan.planner import make_plan
from ringspan.plan.search import Question
from tests.plan.plans import windowed


def question(model="llama-3.1-8b", devices=8, length=65_536, **options):
    return Question(
        shape=model_shape(model),
        device=hardware.device("h100"),
        devices=devices,
        length=length,
        **options,
    )


@pytest.mark.parametrize(
    "text", ["lognormal:2048", "lognormal:100,0", "lognormal:300000"]
)
def test_documents_fill_the_sequence_and_are_the_same_each_time(text):
    lengths = read_documents(text, 70_001)
    assert sum(lengths) == 70_001
    assert all(length > 0 for length in lengths)
    assert lengths == read_documents(text, 70_001)


def test_lengths_of_a_file_are_taken_in_its_order_and_again(tmp_path):
    (tmp_path / "lengths.json").write_text("[5, 1, 30]")
    assert read_documents(str(tmp_path / "lengths.json"), 45) == (5, 1, 30, 5, 1, 3)


@pytest.mark.parametrize(
    ("text", "content", "message"),
    [
        ("lognormal:", None, "needs a median"),
        ("lognormal:nan", None, "needs a median"),
        ("lognormal:5,-1", None, "needs a median"),
        ("lognormal:5,1,2", None, "needs a median"),
        ("missing.json", None, "No such file"),
        ("lengths.json", "[]", "is no list of whole numbers above 0"),
        ("lengths.json", "[1, 2.5]", "is no list"),
        ("lengths.json", "[true]", "is no list"),
        ("lengths.json", "[" * 200_000, "maximum recursion depth"),
        ("lengths.json", "{", "Expecting property name"),
    ],
)
def test_what_is_no_documents_is_refused_in_a_line(
    tmp_path, monkeypatch, text, content, message
):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / text).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_documents(text, 100)
    assert "lognormal:MEDIAN" in str(error.value)
    assert "\n" not in str(error.value)


def test_balance_is_of_pairs_and_one_document_equals_the_plan():
    asked = question()
    plan = make_plan(asked)
    lengths = read_documents("lognormal:2048", asked.length)
    rows = compare_layouts(asked, plan.setting, lengths)
    weighed = [
        row.step_seconds / (0.97 if row.layout == "striped" else 1) for row in rows
    ]
    assert weighed == sorted(weighed)
    found = {row.layout: row for row in rows if row.setting.route == "ring"}
    assert set(found) == {"contiguous", "striped", "zigzag", "balanced"}
    # By hand, token by token: those of a document see all of it that came before.
    seen = [place + 1 for length in lengths for place in range(length)]
    for name in ("contiguous", "zigzag", "striped"):
        spans = [Layout(name, asked.length, 8).spans(rank) for rank in range(8)]
        work = [
            sum(
                seen[p]
                for span in held
                for p in span.positions.tolist()
                if p < asked.length
            )
            for held in spans
        ]
        assert found[name].most_work_over_mean == pytest.approx(
            8 * max(work) / sum(work)
        )
    assert (
        found["balanced"].most_work_over_mean
        < 1.05
        < found["zigzag"].most_work_over_mean
    )
    assert found["balanced"].step_seconds < found["zigzag"].step_seconds
    assert found["balanced"].received_bytes < found["striped"].received_bytes / 5
    one = {
        row.layout: row
        for row in compare_layouts(asked, plan.setting, (asked.length,))
        if row.setting.route == "ring"
    }
    assert one["zigzag"].step_seconds == pytest.approx(plan.cost.seconds, rel=1e-3)
    assert one["zigzag"].received_bytes == pytest.approx(plan.cost.ring_bytes, rel=1e-3)


def test_windows_and_given_routes_are_kept():
    asked = question(route="all-gather")
    asked = replace(asked, shape=windowed(asked.shape, None, 4096))
    rows = compare_layouts(
        asked, make_plan(asked).setting, read_documents("lognormal:9000", asked.length)
    )
    assert {row.setting.route for row in rows} == {"all-gather"}


def test_a_ring_too_long_to_time_is_refused():
    asked = question(devices=128, length=1 << 20)
    setting = make_plan(asked).setting
    assert setting.ring == 128
    with pytest.raises(
        ConfigError, match="rings of up to 64 ranks, and this plan has 128"
    ):
        compare_layouts(asked, setting, (1 << 20,))


def test_documents_of_a_step_that_does_not_fit_are_refused():
    """And not left out without a word."""
    options = [
        "plan",
        "--model",
        "llama-3.1-405b",
        "--devices",
        "1",
        "--documents",
        "lognormal:2048",
    ]
    done = CliRunner().invoke(app, options)
    assert isinstance(done.exception, ConfigError)
    assert "the step does not fit, so no layout is timed" in str(done.exception)


def test_the_command_prints_draws_and_copies_the_fastest_layout(tmp_path):
    options = [
        "plan",
        "--devices",
        "8",
        "--length",
        "65536",
        "--documents",
        "lognormal:2048",
    ]
    printed = CliRunner().invoke(
        app, [*options, "--explain", "--picture", str(tmp_path / "documents.svg")]
    )
    assert "balanced layout, " in (tmp_path / "documents.svg").read_text()
    assert printed.exit_code == 0, printed.output
    assert "packed documents of" in printed.output
    assert 'layout = "balanced"' in printed.output
    assert "data.documents=separate" in printed.output
    answer = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    first = answer["documents"]["layouts"][0]
    assert first["layout"] == "balanced"
    assert first["step_seconds"] < answer["step_seconds"]
