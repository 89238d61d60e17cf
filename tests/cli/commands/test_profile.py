"""``ringspan profile``: its files, its object, its refusals."""

import json

import pytest

from tests.cli.test_bad_input import printed, refusal


@pytest.fixture
def model(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 101}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.long
def test_it_writes_pictures_and_prints_one_object(monkeypatch, capsys, model, tmp_path):
    out = tmp_path / "out"
    options = ("--model", model, "--ranks", "2", "--length", "128", "--route", "auto", "--layers-per-checkpoint", "2")
    result = json.loads(printed(monkeypatch, capsys, "profile", *options, "--out", str(out), "--json"))
    assert [each["rank"] for each in result["ranks"]] == [0, 1]
    assert all(each["peak_bytes"] > 0 and each["step_seconds"] > 0 for each in result["ranks"])
    assert sorted(path.name for path in out.iterdir()) == ["memory.png", "profile.json", "report.html", "timeline.png"]
    assert result["files"] == [
        str(out / name) for name in ("report.html", "memory.png", "timeline.png", "profile.json")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "spiral"], "unknown layout 'spiral'"),
        (["--checkpoint", "some"], "unknown checkpoint policy 'some'"),
        (["--checkpoint", "none", "--layers-per-checkpoint", "2"], "layers share the input that checkpointing keeps"),
        (["--route", "teleport"], "unknown route 'teleport'"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--dtype", "float16"], "--dtype float16 overflows"),
        (["--ranks", "0"], "--ranks"),
        (["--ranks", str(10**18)], "--ranks"),
        (["--batch", str(10**18)], "--batch"),
        (["--length", "long"], "--length"),
        (["--length", str(10**18)], "each of 2 ranks needs"),
        (["--ranks", "2", "--length", "3"], "--length 3: a zigzag ring of 2 needs at least 4"),
        (["--model", "lama-7b"], "did you mean llama-7b"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(monkeypatch, capsys, model, tmp_path, arguments, message):
    out = tmp_path / "out"
    assert message in refusal(monkeypatch, capsys, "profile", "--model", model, "--out", str(out), *arguments)
    assert not out.exists()
