"""Images in a prompt: the tokens of one process."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.cases import long
from tests.torch.mechanisms.media.models import batch_of, build
from tests.torch.mechanisms.media.test_training import IN_A_ROW, MANY, NONE, VIDEO

SETTINGS: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "output_logits": True,
}
SETTINGS |= {"return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 2}


def prompt(kind: str, examples: Any, dtype: torch.dtype = torch.float64) -> Any:
    return {
        name: value
        for name, value in batch_of(kind, examples, dtype=dtype).items()
        if name != "labels"
    }


def asked(
    mesh: DeviceMesh, kind: str, examples: Any, chunk: int, dtype: torch.dtype
) -> Any:
    model: Any = rs.parallelize(build(kind, dtype=dtype), mesh).eval()
    type(model).ring_prefill_tokens = chunk
    out = model.generate(**prompt(kind, examples, dtype), **SETTINGS)
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize(
    ("kind", "ranks", "examples", "chunk"),
    [
        ("smolvlm", 2, [[3, "i", 2, "i", 5]] * 2, 3),
        ("qwen2_5_vl", 3, VIDEO, 4),
        *long(
            ("qwen3_5", 3, [[3, "i", 2, "v", 5]], 4),
            ("gemma3", 3, MANY[:1], 2),
            ("paligemma", 3, MANY[:1], 2),
        ),
        ("audioflamingo3", 3, IN_A_ROW[:1], 3),
        *long(
            ("llava", 3, IN_A_ROW[:1], 3),
            ("llava_onevision", 2, VIDEO, 5),
            ("qwen3_vl", 2, [[3, "i", 2, "v", 5]] * 2, 4),
            ("paligemma", 2, NONE[:1], 2),
            ("voxtral", 2, MANY[:1], 3),
            ("qwen2_audio", 2, MANY[:1], 3),
        ),
    ],
)
def test_a_prompt_with_images_gives_the_tokens_of_one_process(
    pool, kind, ranks, examples, chunk
):
    # whose states are not computed in float64
    dtype = torch.float32 if kind == "qwen3_5" else torch.float64
    bound = 1e-5 if dtype == torch.float32 else 1e-9
    expected = (
        build(kind, dtype=dtype)
        .eval()
        .generate(**prompt(kind, examples, dtype), **SETTINGS)
    )
    for sequences, logits in pool.run(asked, ranks, kind, examples, chunk, dtype):
        assert torch.equal(sequences, expected.sequences)
        assert torch.allclose(
            logits,
            torch.stack(expected.logits),
            rtol=0,
            atol=bound * float(logits.abs().max()),
        )


BEAMS: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}


def asked_with(mesh: DeviceMesh, kind: str, batch: Any, options: Any) -> Any:
    model: Any = rs.parallelize(build(kind), mesh).eval()
    return model.generate(**batch, **SETTINGS | options).sequences


def padded_left(kind: str, examples: Any, dtype: torch.dtype = torch.float64) -> Any:
    batch = prompt(kind, examples, dtype)
    counts = batch["attention_mask"].sum(1).tolist()
    for name in {
        "input_ids",
        "attention_mask",
        "mm_token_type_ids",
        "token_type_ids",
    } & set(batch):
        rows = zip(batch[name], counts, strict=True)
        batch[name] = torch.stack([row.roll(len(row) - count) for row, count in rows])
    return batch


@pytest.mark.parametrize("kind", ["llava", *long("qwen3_vl", "gemma3")])
def test_every_beam_sees_the_images_of_its_own_prompt(pool, kind):
    batch = padded_left(kind, [[3, "i", 2, "i", 5], [2, "i", 2]])
    expected = build(kind).eval().generate(**batch, **SETTINGS | BEAMS).sequences
    for found in pool.run(asked_with, 2, kind, batch, BEAMS):
        assert torch.equal(found, expected)


def test_guessed_tokens_come_behind_the_images(pool):
    batch = prompt("llava", [[7, "i", 5]])
    # behind which the text goes on as it began
    batch["input_ids"][0, -2:] = batch["input_ids"][0, :2]
    options = {"prompt_lookup_num_tokens": 2}
    expected = build("llava").eval().generate(**batch, **SETTINGS | options).sequences
    for found in pool.run(asked_with, 2, "llava", batch, options):
        assert torch.equal(found, expected)


def without_pixels(mesh: DeviceMesh) -> None:
    model: Any = rs.parallelize(build("llava"), mesh).eval()
    model.generate(input_ids=prompt("llava", MANY[:1])["input_ids"], **SETTINGS)


def test_tokens_for_images_without_images_are_refused(pool):
    for outcome in pool.outcomes(without_pixels, 2):
        assert isinstance(outcome, rs.UnsupportedError)
        assert (
            "example 0 of the batch has tokens for images (id 95), and no pixel_values"
            in str(outcome)
        )
