"""``ringspan plan``: what it prints, how fast, and that it needs no framework."""

import json
import subprocess
import sys

import pytest

from ringspan.cli.main import main
from tests.cli.test_bad_input import refusal


def printed(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["ringspan", "plan", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_it_prints_one_object_and_imports_no_framework():
    code = (
        "import sys; from ringspan.cli.main import main; sys.argv = ['ringspan', 'plan', '--json']\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'jax', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["fits"] is True


def test_it_prints_tables_for_people(monkeypatch, capsys):
    text = printed(monkeypatch, capsys, "--devices", "8", "--length", "262144")
    for expected in ("fits", "NVIDIA H100 80 GB", "longest sequence", "minimal block F/B", "checkpoint"):
        assert expected in text


def test_nodes_change_the_links(monkeypatch, capsys):
    options = ("--devices", "8", "--length", "8192", "--json")
    one = json.loads(printed(monkeypatch, capsys, *options))
    four = json.loads(printed(monkeypatch, capsys, *options, "--nodes", "4"))
    assert four["step_seconds"] > one["step_seconds"]


def test_a_trace_takes_the_place_of_the_formula(monkeypatch, capsys, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 101}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--model", str(tmp_path), "--devices", "4", "--length", "4096", "--json")
    formula = json.loads(printed(monkeypatch, capsys, *options))
    picture = tmp_path / "trace.svg"
    drawn = ("--trace", "--rank", "2", "--picture", str(picture))
    traced = json.loads(printed(monkeypatch, capsys, *options, *drawn))
    assert traced["rank"] == 2 and {point["phase"] for point in traced["timeline"]} == {
        "forward", "backward", "optimizer",
    }  # fmt: skip
    assert traced["peak_bytes"] == pytest.approx(formula["peak_bytes"], rel=0.10)
    assert traced["step_seconds"] == formula["step_seconds"]
    assert "<svg" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama-7b"], "did you mean llama-7b"),
        (["--device", "h1000"], "did you mean h100-80gb"),
        (["--nodes", "3"], "--nodes 3 do not share 8 devices"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--parameter-dtype", "int8"], "unknown dtype 'int8'"),
        (["--length", "0"], "--length"),
        (["--model", "gpt2", "--devices", "8", "--length", "9"], "cannot be shared"),
        (["--route", "rnig"], "unknown route 'rnig'"),
        (["--route", "ulysses:3"], "groups of 3 do not divide 8 ranks"),
        (["--model", "gpt2", "--route", "ulysses:8"], "12 query and 12 key/value heads do not split evenly"),
        (["--trace", "--rank", "8"], "--rank 8"),
        (["--picture", "a.png"], "add --trace"),
        (["--trace", "--picture", "a.gif"], "end the name in .png, .svg or .pdf"),
        (["--trace", "--picture", "nowhere/a.png"], "there is no folder nowhere"),
    ],
)
def test_bad_input_is_refused_in_a_line(monkeypatch, capsys, arguments, message):
    assert message in refusal(monkeypatch, capsys, "plan", *arguments)


def test_help_has_an_example(monkeypatch, capsys):
    assert "Example" in printed(monkeypatch, capsys, "--help")
