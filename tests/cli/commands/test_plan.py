"""``ringspan plan``: what it prints, how fast, and that it needs no framework."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringspan.cli.commands.plan import EPILOG
from tests.cases import long, refusals
from tests.cli.test_bad_input import printed, refusal
from tests.surface import MODEL, check_object


def test_it_prints_one_object_and_imports_no_framework():
    code = (
        "import sys; from ringspan.cli.main import main; sys.argv = ['ringspan', 'plan', '--json']\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'jax', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["fits"] is True


def test_it_prints_tables_for_people(monkeypatch, capsys):
    short, text = (
        printed(
            monkeypatch, capsys, "plan", "--devices", "8", "--length", "262144", *more
        )
        for more in ((), ("--explain",))
    )
    answer = (
        "fits: yes",
        "a step: ",
        "limit: computing",
        "longest sequence",
        "NVIDIA H100 80 GB",
        "mesh",
        "made for",
    )
    details = ("c >= F / B", "FLOP/s", "[mesh]", "rs.parallelize(")
    assert all(expected in short and expected in text for expected in answer)
    assert all(expected in text and expected not in short for expected in details)


@pytest.mark.parametrize(
    ("asked", "options", "reason", "line"),
    [
        ("ring", (), "chosen", "ring: the plan chose it"),
        *long(("ulysses", (), "time", "ulysses: 1.1% slower")),
        (
            "ulysses",
            ("--devices", "64"),
            "heads",
            "32 query and 8 key/value heads do not split evenly",
        ),
        *long(
            (
                "ulysses",
                ("--length", "10000000"),
                "memory",
                "does not fit, and the plan does not either",
            )
        ),
        (
            "fsdp",
            ("--length", "1048576"),
            "memory",
            "does not fit; at most 457,942 tokens do",
        ),
        ("fsdp", (), "time", "1 of 8 devices have a sequence"),
        (
            "fsdp",
            ("--length", "8192", "--batch", "8"),
            "better",
            "fits, and is the better choice",
        ),
    ],
)
def test_why_the_plan_is_not_another(monkeypatch, capsys, asked, options, reason, line):
    asking = ("plan", *options, "--why-not", asked)
    text = printed(monkeypatch, capsys, *asking)
    assert line in text and len(text.splitlines()) <= 3
    answer = json.loads(printed(monkeypatch, capsys, *asking, "--json"))["why_not"]
    assert answer["reason"] == reason and "\n".join(answer["lines"]) == text.strip()
    if asked != "fsdp" and reason != "heads":
        given = json.loads(
            printed(monkeypatch, capsys, "plan", *options, "--route", asked, "--json")
        )
        assert answer["peak_bytes"] == given["peak_bytes"] + given["reserve_bytes"]
        assert answer["step_seconds"] == given["step_seconds"]


def test_plain_fsdp_on_one_device_is_the_plan(monkeypatch, capsys):
    options = (
        "--model",
        "qwen3-0.6b",
        "--devices",
        "1",
        "--length",
        "4096",
        "--why-not",
        "fsdp",
        "--json",
    )
    result = json.loads(printed(monkeypatch, capsys, "plan", *options))
    assert (
        result["why_not"]["peak_bytes"]
        == result["peak_bytes"] + result["reserve_bytes"]
    )
    assert result["why_not"]["step_seconds"] == result["step_seconds"]


GENERATE = ("--generate", "--prompt", "100000", "--new-tokens", "50")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "options",
    [
        ("--devices", "8"),
        ("--devices", "1"),
        ("--batch", "16"),
        ("--model", "llama-3.1-405b"),
        ("--prompt", "9"),
    ],
)
def test_the_text_of_generation_says_what_the_object_does(
    monkeypatch, capsys, options, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(monkeypatch, capsys, "plan", *GENERATE, *options).splitlines()
    result = json.loads(
        printed(monkeypatch, capsys, "plan", *GENERATE, *options, "--json")
    )
    assert lines[0].startswith(f"fits: {'yes' if result['fits'] else 'no'}, ")
    assert lines[1].startswith("longest prompt that fits: ")
    assert ("one device would be the better choice" in lines) == (
        result["one_device_is_better"] and "1" not in options
    )
    unwrapped = " ".join(lines)
    assert all(reason.split(": ")[0][:60] in unwrapped for reason in result["reasons"])
    assert ("to generate:" in lines) == result["fits"]
    if result["fits"]:
        command = lines[lines.index("to generate:") + 1]
        assert command.startswith(
            "ringspan generate"
            if result["mesh"]["replicate"] == 1 and "16" not in options
            else "mesh"
        )
    assert max(map(len, lines[: lines.index("why")])) <= columns


def test_the_keys_of_the_objects_are_those_of_before(monkeypatch, capsys):
    check_object("plan", json.loads(printed(monkeypatch, capsys, "plan", "--json")))
    check_object(
        "plan --generate",
        json.loads(printed(monkeypatch, capsys, "plan", *GENERATE, "--json")),
    )


def test_what_generate_refuses_is_said_and_not_told_how_to_run(monkeypatch, capsys):
    options = (*GENERATE, "--prompt", "1000000")
    lines = printed(monkeypatch, capsys, "plan", *options).splitlines()
    assert lines[0].startswith("fits: yes, ") and lines[2] == (
        "too long: 1,000,050 tokens, the model has 131,072 positions"
    )
    assert "to generate:" not in lines
    result = json.loads(printed(monkeypatch, capsys, "plan", *options, "--json"))
    assert (
        result["positions"] == 131_072
        and "ringspan generate refuses 1,000,050 tokens" in result["reasons"][0]
    )


def test_generate_accepts_the_examples_of_generation(monkeypatch, capsys):
    example = EPILOG.rpartition("ringspan plan ")[2].split()
    result = json.loads(printed(monkeypatch, capsys, "plan", *example, "--json"))
    assert result["fits"] and not any(
        "refuses" in reason for reason in result["reasons"]
    )


def test_nodes_change_the_links(monkeypatch, capsys):
    options = ("--devices", "8", "--length", "8192", "--json")
    one = json.loads(printed(monkeypatch, capsys, "plan", *options))
    four = json.loads(printed(monkeypatch, capsys, "plan", *options, "--nodes", "4"))
    assert four["step_seconds"] > one["step_seconds"]


def test_a_trace_takes_the_place_of_the_formula(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    options = ("--model", str(tmp_path), "--devices", "4", "--length", "4096", "--json")
    formula = json.loads(printed(monkeypatch, capsys, "plan", *options))
    picture = tmp_path / "trace.svg"
    drawn = ("--trace", "--rank", "2", "--picture", str(picture))
    traced = json.loads(printed(monkeypatch, capsys, "plan", *options, *drawn))
    assert traced["rank"] == 2 and {point["phase"] for point in traced["timeline"]} == {
        "forward",
        "backward",
        "optimizer",
    }
    assert traced["peak_bytes"] == pytest.approx(formula["peak_bytes"], rel=0.10)
    assert traced["step_seconds"] == formula["step_seconds"]
    assert "<svg" in picture.read_text(encoding="utf-8")


@refusals("plan")
def test_bad_input_is_refused_in_a_line(monkeypatch, capsys, arguments, message):
    assert message in refusal(monkeypatch, capsys, "plan", *arguments)


GENERATED = (
    "--generate",
    "--devices",
    "8",
    "--device",
    "h100",
    "--prompt",
    "130000",
    "--new-tokens",
    "500",
)


@pytest.mark.parametrize("page", ["planning.md", "start.md"])
def test_the_pages_show_what_is_printed(monkeypatch, capsys, page):
    text = (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8")
    shown = [
        block
        for block in re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE)
        if "    fits: " in block
    ]
    commands = (("--devices", "8", "--device", "h100", "--length", "524288"), GENERATED)
    assert len(shown) == (2 if page == "planning.md" else 1)
    for block, options in zip(shown, commands, strict=False):
        printed_now = printed(
            monkeypatch, capsys, "plan", "--model", "llama-3.1-8b", *options
        )
        assert " ".join(block.split()) in " ".join(printed_now.split())
