"""The examples that use trainers run, in short form."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hf.launchers import launched

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(mesh: Any, name: str, arguments: list[str]) -> Any:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(arguments)


def test_sft(world, tmp_path):
    first, second = world(2).run(
        run, 2, "sft", ["--output", str(tmp_path), "--steps", "4", "--max-length", "64"]
    )
    assert first == pytest.approx(second) and 0 < first < 4
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    assert model(**tokenizer("1 + 2 =", return_tensors="pt")).logits.shape[1] == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said", "launcher"),
    [
        ("sft", "evaluation loss ", "torchrun"),
        ("dpo", "prefers the right answer in ", "accelerate"),
        ("grpo", "reward ", "torchrun"),
    ],
)
def test_an_example_is_launched(tmp_path, name, said, launcher):
    """What it prints is of rank 0 alone, behind what the trainers log."""
    out = launched(launcher, name, tmp_path, "--output", "out", "--steps", "3")
    assert [line for line in out.splitlines() if line.startswith(said)] == [
        out.splitlines()[-1]
    ]
    assert out.endswith(f", model in {tmp_path / 'out'}\n")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0
