"""Models that see: a small tower, and a batch with images."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

import ringspan as rs
from ringspan.proof.run import Proof, prove
from ringspan.proof.seeing import IMAGES, TOWERS
from ringspan.proof.small import proven_part, small_model
from tests.cases import long
from tests.proof.test_run import planted


def proven(mesh: Any, kind: str, plant: Any = None) -> Proof:
    with planted(plant):
        return prove(CONFIG_MAPPING[kind](), mesh)


@pytest.mark.parametrize("kind", ["gemma3", *long("qwen3_vl", "llava", "qwen2_vl")])
def test_models_that_see_are_exact_with_images(pool, kind):
    for proof in pool.run(proven, 2, kind):
        assert proof.is_exact, proof.as_json()
        by_batch = {row.batch: row for row in proof.rows}
        assert not by_batch[IMAGES].refused
        assert by_batch[IMAGES].error < 1e-12


def brighter_images(model: Any) -> None:
    model.model.multi_modal_projector.register_forward_hook(
        lambda *call: call[2] * 1.01
    )


@pytest.mark.long
def test_a_fault_in_what_a_tower_gives_shows_in_the_images_alone(pool):
    for proof in pool.run(proven, 2, "llava", brighter_images):
        assert [row.batch for row in proof.rows if not row.is_exact] == [IMAGES]


@pytest.mark.parametrize("kind", TOWERS)
def test_a_small_tower_fits_its_language_model(kind):
    small = small_model(CONFIG_MAPPING[kind]())
    assert small.config.model_type == kind
    assert small.layers == 2 and small.parameters < 300_000


def test_of_a_model_that_hears_the_language_model_is_left():
    part = proven_part(CONFIG_MAPPING["qwen2_audio"](), is_narrow=True)
    assert part.model_type == "qwen2" and small_model(part).layers == 2


@pytest.mark.parametrize("kind", ["mllama", "glm4v"])
def test_other_models_that_see_or_hear_are_refused_in_a_line(kind):
    with pytest.raises(rs.UnsupportedError, match="but for gemma3, llava") as raised:
        proven_part(CONFIG_MAPPING[kind](), is_narrow=True)
    assert "\n" not in str(raised.value)
