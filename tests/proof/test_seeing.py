"""Models that see: a small tower, and a batch with images."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from ringspan.proof.run import Proof, prove
from ringspan.proof.seeing import IMAGES, TOWERS, sees
from ringspan.proof.small import MOST_PARAMETERS, VOCABULARY, small_model
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


@pytest.mark.parametrize(
    "kind",
    [
        "glm4v",
        "qwen2_audio",
        "mllama",  # layers that attend to images
        "glm5_next",  # an index of pools
        *long("janus", "muse_spark", "idefics2", "granite_speech", "kosmos-2.5"),
    ],
)
def test_any_tower_is_made_small_around_its_language_model(kind):
    config = CONFIG_MAPPING[kind]()
    small = small_model(config)
    assert type(small.config) is type(config) and sees(small.config)
    assert small.parameters < MOST_PARAMETERS
    assert small.config.get_text_config().vocab_size == VOCABULARY
