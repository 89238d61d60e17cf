"""DPO, KTO, ORPO and reward models on a ring are what they are on one process, whatever the reference is."""

import tempfile
from typing import Any

import pytest

from ringspan.torch.layers.modules import local_part
from tests.cases import long
from tests.hf.preferences import dpo, kto, orpo, reward
from tests.hf.trainers import SHORT, check, made, short_run


@pytest.mark.parametrize(
    ("make", "model", "options"),
    [
        (dpo, "llama", {"lora": True}),
        (kto, "qwen3-window", {}),
        (orpo, "llama", {}),
        (reward, "llama", {"center_rewards_coefficient": 0.1}),
        *long(
            (dpo, "mixtral+router", {"ld_alpha": 0.5, "use_weighting": True}),
            (kto, "llama", {"lora": True}),
            (orpo, "mixtral+router", {"lora": True}),
            (reward, "qwen3-window", {"lora": True}),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_steps_on_a_ring_equal_one_process(world, make, model, options):
    expected = short_run(make, model, 1, *options.items())
    check(world, 2, make, model, dict([SHORT]) | options, expected)


def weights_here(mesh: Any) -> list[float]:
    """The share of its weights that this rank holds: of the model, and of the reference model."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = dpo(mesh, "llama", {}, folder, dict([SHORT]))
        return [
            sum(local_part(weight).numel() for weight in model.parameters())
            / sum(weight.numel() for weight in model.parameters())
            for model in (trainer.model, trainer.ref_model)
        ]


def test_a_reference_model_is_split_as_the_model_is(world):
    for trained, reference in world(2).run(weights_here, 2):
        assert 0.4 < trained < 0.6 and reference == trained


def test_a_reference_of_the_models_folder_follows_the_model(world, tmp_path):
    made("llama").save_pretrained(tmp_path)
    options = {"place": str(tmp_path), "reference": None}
    options |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    expected = short_run(dpo, "llama", 1, *options.items())
    still = short_run(dpo, "llama", 1, *options.items(), ("sync_ref_model", False))
    assert expected["loss"][0] == pytest.approx(0.693147, rel=1e-5) and expected["loss"][1:] != still["loss"][1:]
    check(world, 2, dpo, "llama", dict([SHORT]) | options, expected)
