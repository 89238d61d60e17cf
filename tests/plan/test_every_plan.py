"""Any model on any devices at any length: a plan makes sense, its text is readable, and 700 are as committed."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.cli.commands.plan import shown_mesh
from ringspan.cli.plan_tables import show
from ringspan.core.errors import RingspanError
from ringspan.plan.cluster.devices import DEVICES
from ringspan.plan.model.configs import MODELS
from ringspan.plan.planner import make_plan
from ringspan.plan.search import MOST, Question
from tests.cases import few
from tests.fuzz import FACTOR, examples
from tests.plan.plans import COUNT, FILE, answer, answers, questions

LENGTHS = (1, 4096, 131_072, 1_000_003, 1 << 26)
DEVICE_COUNTS = (1, 2, 3, 8, 12, 64, 512)


def check(plan):
    """No nonsense: nothing negative, infinite or more than everything."""
    result = plan.as_json()
    json.dumps(result, allow_nan=False)
    assert all(num_bytes >= 0 for num_bytes in result["bytes"].values())
    assert sum(result["bytes"].values()) == result["peak_bytes"] > 0
    assert all(
        num_bytes >= 0
        for num_bytes in (*result["link_bytes_per_step"].values(), result["host_bytes"])
    )
    assert (
        0 < result["mfu"] < 1
        and result["tokens_per_second"] > 0
        and result["flops_per_step"] > 0
    )
    assert 0 < plan.cost.compute_seconds <= plan.cost.seconds * (1 + 1e-9)
    mesh = result["mesh"]
    assert (
        mesh["replicate"] * mesh["ring"] * mesh["tp"] == plan.question.devices
        and mesh["ring"] % mesh["ulysses"] == 0
    )
    assert (
        result["micro_steps"] * result["micro_batch"] * mesh["replicate"]
        == plan.question.batch
    )
    if result["fits"]:
        assert result["peak_bytes"] <= plan.question.device.memory_bytes
        assert result["max_length_tokens"] >= plan.question.length
    else:
        assert "do not fit" in result["reasons"][0]
    return result


def check_text(plan, result, monkeypatch, capsys):
    """The verdict first, every line within 80 columns, no value torn apart."""
    monkeypatch.setenv("COLUMNS", "80")
    show(plan, result, shown_mesh(result))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"fits: {'yes' if result['fits'] else 'no'}, ")
    assert lines[1].startswith("a step: ") and lines[2].startswith(
        "longest sequence that fits: "
    )
    assert [line for line in lines if len(line) > 80] == []
    facts = lines[lines.index("how to run it") : lines.index("why")]
    assert [line for line in facts if re.match(" {5}", line)] == [], (
        "a value goes on below itself"
    )
    assert not re.search(
        r"\bnan\b|\binf\b|(?<!\w)-\d|\b0\.0+ ", "\n".join(lines[: lines.index("why")])
    ), lines


@pytest.mark.parametrize("index", few(range(len(DEVICES)), 3))
def test_every_device_and_every_model(monkeypatch, capsys, index):
    device, model = (
        list(DEVICES.values())[index],
        list(MODELS.values())[index % len(MODELS)],
    )
    length = LENGTHS[1 + index % (len(LENGTHS) - 1)]
    devices = DEVICE_COUNTS[index % len(DEVICE_COUNTS)]
    batch = devices if index % 2 else 1
    plan = make_plan(
        Question(
            shape=model, device=device, devices=devices, length=length, batch=batch
        )
    )
    check_text(plan, check(plan), monkeypatch, capsys)


def test_the_largest_question(monkeypatch, capsys):
    most = {name: MOST[name] for name in ("devices", "length", "batch")}
    question = Question(shape=MODELS["llama-3.1-8b"], device=DEVICES["b200"], **most)
    plan = make_plan(replace(question, batch=1))
    check_text(plan, check(plan), monkeypatch, capsys)
    check(make_plan(replace(question, devices=8)))


@examples(12)
@given(
    st.sampled_from(list(MODELS.values())),
    st.sampled_from(list(DEVICES.values())),
    st.sampled_from(DEVICE_COUNTS),
    st.one_of(st.sampled_from(LENGTHS), st.integers(1, 1 << 24)),
    st.sampled_from((1, 8, 64)),
    st.sampled_from(("bfloat16", "float32")),
)
def test_any_question(shape, device, devices, length, batch, dtype):
    try:
        question = Question(
            shape=shape,
            device=device,
            devices=devices,
            length=length,
            batch=batch,
            dtype=dtype,
        )
        plan = make_plan(question)
    except RingspanError as error:
        assert "\n" not in str(error) and "cannot be shared" in str(error)
        assert length < 2 * devices or batch % devices, (
            "there is always a ring of all devices"
        )
        return
    check(plan)


ROWS = json.loads(FILE.read_text())


def test_the_questions_are_those_of_the_file():
    assert [asked for asked, _ in ROWS] == list(questions())
    assert (
        len(ROWS) == COUNT
        and sum(len(answered) > 1 for _, answered in ROWS) > COUNT // 2
    )


@pytest.mark.parametrize("number", range(0, COUNT, 70))
def test_a_plan_is_as_committed(number):
    asked, expected = ROWS[number]
    assert answer(asked) == expected, asked


@pytest.mark.hypothesis
@pytest.mark.skipif(FACTOR <= 1, reason="`make fuzz` makes all of them")
def test_every_plan_is_as_committed():
    found = answers([asked for asked, _ in ROWS])
    assert [row for row, now in zip(ROWS, found, strict=True) if row[1] != now] == []
