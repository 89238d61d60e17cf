"""Images that do not fit a model or a text: one line that says so, on every rank alike, before any computes."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.torch.mechanisms.media.kinds import kinds
from tests.torch import models as text_models
from tests.torch.mechanisms.media.models import IMAGE, Example, batch_of, build

EXAMPLES: list[Example] = [[4, "i", 3], [2, "i", 5]]
TEXT = torch.full((2, 11), 3)
LARGE = torch.zeros(2, 3, 12, 12, dtype=torch.float64)
ODD = torch.tensor([[1, 4, 4], [1, 3, 4]])
SQUARE = torch.full((2, 2), 16)
TWO_RUNS = torch.tensor([[0] * 9 + [1, 0], [0] * 7 + [1] * 4])


def changed(kind: str, changes: dict[str, Any]) -> Any:
    """A batch of which some values are left out, indexed, or replaced."""
    batch = batch_of(kind, EXAMPLES)
    for name, change in changes.items():
        batch[name] = (
            batch[name][change] if isinstance(change, slice | tuple | list) else change
        )
    return {name: value for name, value in batch.items() if value is not None}


def one_token_fewer(kind: str) -> dict[str, Tensor]:
    """The ids of a batch whose last token for an image is text."""
    ids = batch_of(kind, EXAMPLES)["input_ids"]
    ids[1, (ids[1] == IMAGE).nonzero()[-1]] = 3
    return {"input_ids": ids}


def called(mesh: DeviceMesh, kind: str, *batches: Any) -> None:
    """With a batch for each rank, or one for all."""
    model = rs.parallelize(build(kind), mesh)
    model(**rs.shard_batch(batches[mesh["ring"].get_local_rank() % len(batches)], mesh))


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gemma3": [
        (
            {"pixel_values": None},
            "example 0 of the batch has tokens for images (id 95), and no pixel_values",
        )
    ],
    "llava": [
        (
            {"input_ids": TEXT},
            "pixel_values holds images, and no example of the batch has a token for them",
        ),
        (
            {"pixel_values": np.s_[:1]},
            "example 1 of the batch has 4 tokens for images, and its images make 0",
        ),
        (
            {"pixel_values_videos": LARGE[None]},
            "ForConditionalGeneration takes no pixel_values_videos on a",
        ),
        (
            {"pixel_values": LARGE},
            "has images of 12 x 12, the model's have 8 x 8; the processor must be",
        ),
        (
            {"pixel_values": np.s_[:, None]},
            "must be (images, channels, height, width), got (2, 1,",
        ),
    ],
    "qwen2_5_vl": [
        (
            one_token_fewer("qwen2_5_vl"),
            "has 2 tokens for images, and its images make 3",
        ),
        (
            {"image_grid_thw": ODD},
            "image 1 (example 1 of the batch) has 3 x 4 patches, which blocks of",
        ),
        (
            {"image_grid_thw": np.s_[0, :]},
            "image_grid_thw must be whole numbers of at least 1, of shape",
        ),
        (
            {"pixel_values": np.s_[:, :50]},
            "pixel_values has patches of 50 values, the model's have 96",
        ),
    ],
    "audioflamingo3": [
        (one_token_fewer("audioflamingo3"), "for audios, and its audios make"),
        (
            {"input_features_mask": None},
            "with input_features_mask (windows, steps), got",
        ),
    ],
    "qwen3_vl": [
        ({"pixel_values": None}, "image_grid_thw came without pixel_values"),
        ({"image_grid_thw": None}, "pixel_values needs image_grid_thw too"),
        (
            {"image_grid_thw": [1, 1]},
            "pixel_values holds 28 patches, image_grid_thw says 24",
        ),
    ],
    "internvl": [
        (
            {"pixel_values": np.s_[:, :1]},
            "pixel_values has 1 channels, the model's images have 3",
        )
    ],
    "mistral3": [
        (
            {"image_sizes": 2 * SQUARE},
            "32 x 32 of image 0 (example 0 of the batch), pixel_values holds",
        ),
        ({"image_sizes": None}, "pixel_values needs image_sizes too"),
        (
            {"image_sizes": np.s_[:1]},
            "and image_sizes are for different numbers of images: 2, 1",
        ),
    ],
    "llava_onevision": [
        (
            {"image_sizes": SQUARE, "pixel_values": np.s_[:, :3]},
            "5 tiles, pixel_values holds 3",
        )
    ],
    "voxtral": [
        (
            {"input_features": np.s_[..., :20]},
            "has windows of 20 steps, the model's have 24",
        )
    ],
    "paligemma": [
        (
            {"input_ids": TEXT, "pixel_values": None, "token_type_ids": None},
            "needs token_type_ids beside",
        ),
        (
            {"token_type_ids": TWO_RUNS},
            "example 0 of the batch has 2 runs of tokens with token_type_ids",
        ),
    ],
}


def refused_in_turn(mesh: DeviceMesh, kind: str) -> None:
    model = rs.parallelize(build(kind), mesh)
    for changes, message in REFUSED[kind]:
        with pytest.raises(rs.UnsupportedError, match=re.escape(message)):
            model(**rs.shard_batch(changed(kind, changes), mesh))


@pytest.mark.parametrize("kind", REFUSED)
def test_images_that_do_not_fit_are_refused_on_every_rank(pool, kind):
    pool.run(refused_in_turn, 2, kind)


def test_images_that_touch_are_refused_on_every_rank(pool):
    for outcome in pool.outcomes(
        called, 2, "qwen3_vl", batch_of("qwen3_vl", [[4, "i", "i", 3]])
    ):
        assert isinstance(outcome, rs.UnsupportedError)
        assert "cannot tell the positions of this text from its grids" in str(outcome)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            torch.ones(2, 3, 16, 16),
            "the ranks of one ring were given different images and token types",
        ),
        (
            None,
            "example 0 of the batch has tokens for images (id 95), and no pixel_values",
        ),
    ],
    ids=["other pixels", "no images"],
)
def test_other_images_on_one_rank_are_refused_on_every_rank(pool, change, message):
    batches = changed("internvl", {}), changed("internvl", {"pixel_values": change})
    for outcome in pool.outcomes(called, 2, "internvl", *batches):
        assert isinstance(outcome, rs.RingspanError) and message in str(outcome), (
            outcome
        )


def test_the_example_is_the_one_whose_tokens_come_next():
    """An example without images lies between: image 0 makes the 4 tokens of example 1, image 1 those of example 3."""
    sizes = torch.tensor([[16, 16], [8, 24]])
    pixels = {"pixel_values": torch.zeros(2, 3, 16, 16), "image_sizes": sizes}
    with pytest.raises(
        rs.UnsupportedError,
        match=r"image 1 \(example 3 of the batch\), pixel_values holds",
    ):
        kinds()["mistral3"].modalities[0].cut.check_model(
            pixels, build("mistral3").config, [0, 4, 0, 3]
        )


def of_text_model(mesh: DeviceMesh) -> None:
    ids = text_models.tokens(1, 16)
    model = rs.parallelize(text_models.build("llama"), mesh)
    model(
        **rs.shard_batch(
            {"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(1, 3, 8, 8)},
            mesh,
        )
    )


def test_a_model_of_text_takes_no_images(pool):
    for outcome in pool.outcomes(of_text_model, 2):
        assert isinstance(outcome, rs.UnsupportedError)
        assert "LlamaForCausalLM takes no pixel_values on a ring" in str(outcome)


def compiled(mesh: DeviceMesh) -> None:
    model = rs.parallelize(build("gemma3"), mesh, compile="eager")
    model(**rs.shard_batch(batch_of("gemma3", [[4, "i", 3]]), mesh))


def test_compiled_layers_do_not_see_later_tokens(pool):
    for outcome in pool.outcomes(compiled, 2):
        assert isinstance(outcome, rs.UnsupportedError) and "use compile=False" in str(
            outcome
        ), outcome
