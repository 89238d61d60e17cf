"""Images that do not fit a model or a text: one line that says so, on every rank alike, before any computes."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.torch.multimodal.kinds import KINDS
from tests.torch import models as text_models
from tests.torch.multimodal.models import IMAGE, batch_of, build


def called(mesh: DeviceMesh, kind: str, how: str) -> None:
    whole: Any = batch_of(kind, [[4, "i", 3], [2, "i", 5]])
    ids = whole["input_ids"]
    match how:
        case "no pixels":
            whole = {"input_ids": ids.clone()}
            whole["input_ids"][0][ids[0] == IMAGE] = 3  # the second example still has tokens for images
        case "token types alone":
            del whole["pixel_values"]
        case "no tokens":
            whole["input_ids"] = ids.masked_fill(ids == IMAGE, 3)
        case "one image too few":
            whole["pixel_values"] = whole["pixel_values"][:1]
        case "one token too few":
            whole["input_ids"][1][ids[1] == IMAGE] = torch.tensor([IMAGE] * int((ids[1] == IMAGE).sum() - 1) + [3])
        case "videos":
            whole["pixel_values_videos"] = torch.zeros(1, 2, 3, 8, 8)
        case "a grid without pixels":
            del whole["pixel_values"]
        case "no grid":
            del whole["image_grid_thw"]
        case "a grid of other patches":
            whole["image_grid_thw"] = whole["image_grid_thw"] * 2
        case "odd rows":
            whole["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 3, 4]])
        case "sizes of other images":
            whole["image_sizes"] = whole["image_sizes"][:1]
        case "another size":
            whole["pixel_values"] = torch.zeros(2, 3, 12, 12, dtype=torch.float64)
        case "grey images":
            whole["pixel_values"] = whole["pixel_values"][:, :1]
        case "a size beyond its pixels":
            whole["image_sizes"][1] = 24
        case "patches of another size":
            whole["pixel_values"] = whole["pixel_values"][:, :50]
        case "images that touch":
            whole = batch_of(kind, [[4, "i", "i", 3]])
        case "tiles of another image":
            whole["image_sizes"][0] = torch.tensor([16, 16])
            whole["pixel_values"] = whole["pixel_values"][:, :3]
        case "tiles of an only image beside two":
            whole = batch_of(kind, [[2, "i", "i", 2], [3, "i", 8]])
            whole["image_sizes"][2] = torch.tensor([16, 16])
            whole["pixel_values"] = whole["pixel_values"][:, :3]
        case "no sizes":
            del whole["image_sizes"]
        case "a size of less than a token":
            whole["image_sizes"][1, 0] = 4
        case "an image for each example":
            whole["pixel_values"] = whole["pixel_values"][:, None]
        case "a flat grid":
            whole["image_grid_thw"] = whole["image_grid_thw"][0]
        case "a grid of no frames":
            whole["image_grid_thw"] = torch.cat((whole["image_grid_thw"], torch.tensor([[0, 4, 4]])))
        case "short windows":
            whole["input_features"] = whole["input_features"][..., :20]
        case "no mask":
            del whole["input_features_mask"]
        case "no types":
            whole = {"input_ids": ids.masked_fill(ids == IMAGE, 3)}
        case "two prompts":
            whole["token_type_ids"][0, -1] = 0
        case "other pixels on one rank":
            whole["pixel_values"] = whole["pixel_values"] + mesh["ring"].get_local_rank()
        case "images on one rank":
            if mesh["ring"].get_local_rank() == 1:
                del whole["pixel_values"]
        case _:
            raise AssertionError(how)
    model = rs.parallelize(build(kind), mesh)
    model(**rs.shard_batch(whole, mesh))


@pytest.mark.parametrize(
    ("kind", "how", "message"),
    [
        (
            "llava",
            "no pixels",
            "example 1 of the batch has tokens for images (id 95), and no pixel_values came",
        ),
        ("gemma3", "token types alone", "example 0 of the batch has tokens for images (id 95), and no pixel_values"),
        ("llava", "no tokens", "pixel_values holds images, and no example of the batch has a token for them (id 95)"),
        ("llava", "one image too few", "example 1 of the batch has 4 tokens for images, and its images make 0"),
        ("qwen2_5_vl", "one token too few", "example 1 of the batch has 2 tokens for images, and its images make 3"),
        ("mistral3", "one token too few", "example 1 of the batch has 1 tokens for images, and its images make 2"),
        ("llava", "videos", "LlavaForConditionalGeneration takes no pixel_values_videos on a ring"),
        ("qwen3_vl", "a grid without pixels", "image_grid_thw came without pixel_values"),
        ("qwen3_vl", "no grid", "pixel_values needs image_grid_thw beside it"),
        ("qwen3_vl", "a grid of other patches", "pixel_values holds 28 patches, image_grid_thw says"),
        ("qwen2_5_vl", "odd rows", "image 1 (example 1 of the batch) has 3 x 4 patches, which blocks of"),
        ("llava", "another size", "pixel_values has images of 12 x 12, the model's have 8 x 8; the processor must be"),
        ("gemma3", "another size", "pixel_values has images of 12 x 12, the model's have 16 x 16"),
        ("internvl", "grey images", "pixel_values has 1 channels, the model's images have 3"),
        (
            "mistral3",
            "a size beyond its pixels",
            "image_sizes says 24 x 24 of image 1 (example 1 of the batch), pixel_values holds 16 x 16 of it",
        ),
        ("qwen2_5_vl", "patches of another size", "pixel_values has patches of 50 values, the model's have 96"),
        ("qwen3_vl", "images that touch", "cannot tell the positions of this text from its grids"),
        (
            "llava_onevision",
            "tiles of another image",
            "(example 0 of the batch), which makes 5 tiles, pixel_values",
        ),
        (
            "llava_onevision",
            "tiles of an only image beside two",
            "of image 2 (example 1 of the batch), which makes 5 tiles, pixel_values holds 3",
        ),
        ("mistral3", "no sizes", "pixel_values needs image_sizes beside it"),
        ("mistral3", "a size of less than a token", "of image 1 (example 1 of the batch), pixel_values holds"),
        ("llava", "an image for each example", "pixel_values must be (images, channels, height, width), got (2, 1,"),
        ("qwen2_5_vl", "a flat grid", "image_grid_thw must be whole numbers of at least 1, of shape (images, 3)"),
        ("qwen3_vl", "a grid of no frames", "image_grid_thw must be whole numbers of at least 1"),
        ("voxtral", "short windows", "input_features has windows of 20 steps, the model's have 24"),
        ("audioflamingo3", "no mask", "with input_features_mask (windows, steps) beside it, got (2, 8, 24) and None"),
        ("audioflamingo3", "one token too few", "for audios, and its audios make"),
        ("paligemma", "no types", "needs token_type_ids beside input_ids: 0 for a prompt"),
        ("paligemma", "two prompts", "example 0 of the batch has 2 runs of tokens with token_type_ids=0"),
        ("mistral3", "sizes of other images", "pixel_values and image_sizes are for different numbers of images: 2, 1"),
    ],
)
def test_images_that_do_not_fit_are_refused_on_every_rank(pool, kind, how, message):
    for outcome in pool.outcomes(called, 2, kind, how):
        assert isinstance(outcome, rs.UnsupportedError) and message in str(outcome), outcome


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("other pixels on one rank", "the ranks of one ring were given different images and token types"),
        ("images on one rank", "example 0 of the batch has tokens for images (id 95), and no pixel_values"),
    ],
)
def test_other_images_on_one_rank_are_refused_on_every_rank(pool, how, message):
    for outcome in pool.outcomes(called, 2, "internvl", how):
        assert isinstance(outcome, rs.RingspanError) and message in str(outcome), outcome


def test_the_example_is_the_one_whose_tokens_come_next():
    """An example without images lies between: image 0 makes the 4 tokens of example 1, image 1 those of example 3."""
    sizes = torch.tensor([[16, 16], [8, 24]])
    pixels = {"pixel_values": torch.zeros(2, 3, 16, 16), "image_sizes": sizes}
    with pytest.raises(rs.UnsupportedError, match=r"image 1 \(example 3 of the batch\), pixel_values holds"):
        KINDS["mistral3"].modalities[0].cut.check_model(pixels, build("mistral3").config, [0, 4, 0, 3])


def of_text_model(mesh: DeviceMesh) -> None:
    ids = text_models.tokens(1, 16)
    model = rs.parallelize(text_models.build("llama"), mesh)
    model(**rs.shard_batch({"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(1, 3, 8, 8)}, mesh))


def test_a_model_of_text_takes_no_images(pool):
    for outcome in pool.outcomes(of_text_model, 2):
        assert isinstance(outcome, rs.UnsupportedError)
        assert "LlamaForCausalLM takes no pixel_values on a ring" in str(outcome)


def compiled(mesh: DeviceMesh) -> None:
    model = rs.parallelize(build("gemma3"), mesh, compile="eager")
    model(**rs.shard_batch(batch_of("gemma3", [[4, "i", 3]]), mesh))


def test_compiled_layers_do_not_see_later_tokens(pool):
    for outcome in pool.outcomes(compiled, 2):
        assert isinstance(outcome, rs.UnsupportedError) and "use compile=False" in str(outcome), outcome
