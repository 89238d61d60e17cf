"""``ringspan export``: what it prints, and what it refuses."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.cases import refusals
from tests.cli.test_bad_input import printed, refusal
from tests.every_model.tiny import tiny_model
from tests.torch.model.test_peft import stir
from tests.train.runs import settings, train_on, write_text


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory):
    folder = write_text(tmp_path_factory.mktemp("export"))
    pool.run(
        train_on, 4, settings(folder, "run", steps=2, checkpoints={"every_steps": 1})
    )
    return folder / "run"


def test_it_says_what_it_wrote(run, tmp_path, monkeypatch, capsys):
    result = json.loads(
        printed(monkeypatch, capsys, "export", run, "1", tmp_path / "first", "--json")
    )
    weights = tmp_path / "first" / "model.safetensors"
    assert result.pop("bytes") == pytest.approx(weights.stat().st_size, rel=0.1)
    assert result == {"step": 1, "folder": str(tmp_path / "first")}
    assert printed(
        monkeypatch, capsys, "export", run, "latest", tmp_path / "last"
    ).startswith(f"wrote {tmp_path / 'last'}: step 2, ")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "last").num_parameters() > 0


@refusals("export")
def test_bad_input_is_one_line(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(monkeypatch, capsys, "export", run, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_run_is_named(tmp_path, monkeypatch, capsys):
    said = refusal(monkeypatch, capsys, "export", tmp_path, "latest", tmp_path / "new")
    assert "is no folder of a run (run.json is missing)" in said


def test_an_adapter_over_four_bits_is_merged_into_its_base(
    tmp_path, monkeypatch, capsys
):
    """As PEFT merges it, in the base's dtype, with the tokenizer and tied weights of the base."""
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    opened = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=packed
    )
    targets = {"target_modules": "all-linear", "modules_to_save": ["norm"]}
    model = stir(
        get_peft_model(opened, LoraConfig(task_type="CAUSAL_LM", r=4, **targets))
    )
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = (
        PeftModel.from_pretrained(base, tmp_path / "adapter")
        .merge_and_unload(safe_merge=True)
        .state_dict()
    )
    said = printed(
        monkeypatch, capsys, "export", "--merge", tmp_path / "adapter", tmp_path / "new"
    )
    assert said.startswith(f"wrote {tmp_path / 'new'}: the merged model, ")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "new").state_dict()
    assert found.keys() == expected.keys()
    assert all(
        x.dtype == torch.bfloat16 and torch.equal(x, expected[name])
        for name, x in found.items()
    )
    capsys.readouterr()
    refused = [
        ("adapter", "new", "is there already"),
        ("base", "other", "has no adapter_config.json"),
    ]
    for source, target, why in refused:
        assert why in refusal(
            monkeypatch,
            capsys,
            "export",
            "--merge",
            tmp_path / source,
            tmp_path / target,
        )
    assert "or --merge ADAPTER FOLDER" in refusal(
        monkeypatch, capsys, "export", tmp_path / "adapter", "latest"
    )
