"""Tiny random models that take images, batches for them, and what one process makes of both."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

from ringspan.proof.float64 import in_float64_of

IMAGE, VIDEO = 95, 96
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
_TOWER: Final = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_MODELS: Final = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)

KINDS: Final = tuple(_MODELS)
SOUND: Final = ("audioflamingo3", "voxtral", "qwen2_audio")

# The images of a batch, one after the other: grids of Qwen, sizes of Pixtral and LLaVA-OneVision.
_GRIDS: Final = ((1, 4, 4), (1, 2, 6), (1, 6, 4))
_VIDEO_GRIDS: Final = ((3, 4, 2), (2, 2, 2))
_SIZES: Final = ((16, 8), (8, 16), (16, 16))
_ORIGINALS: Final = ((8, 16), (15, 8), (16, 12))


def build(kind: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(seed)
    text, tower, others = (_MODELS[kind][part] for part in ("text", "tower", "config"))
    tower = tower if kind.startswith("qwen") else _TOWER | tower
    seen = "audio_config" if kind in SOUND else "vision_config"
    others = others | {
        "text_config": _TEXT | text,
        seen: tower,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(kind.partition("-")[0], **others)
    auto = (
        AutoModelForSeq2SeqLM if kind == "audioflamingo3" else AutoModelForMultimodalLM
    )
    model = auto.from_config(config, attn_implementation="sdpa")
    # some of them start as zeros, behind which nothing has a gradient
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    # Their own code says float32.
    if dtype == torch.float64 and kind in ("qwen3_5", "llava-indexed"):
        return in_float64_of(model)
    # Llama 4's tables are complex
    return model if dtype == torch.float32 else model.to(dtype)


Example = Sequence[int | str]


def batch_of(
    kind: str,
    examples: Sequence[Example],
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
    *,
    alike: bool = False,
) -> Any:
    """What a processor would return for examples of so many tokens of text, images (``i``) and videos (``v``), which
    have different sizes unless they are ``alike``.

    Shorter examples are padded on the right.
    """
    generator = torch.Generator().manual_seed(seed)
    images = [sum(part == "i" for part in example) for example in examples]
    videos = sum(part == "v" for example in examples for part in example)
    inputs: dict[str, Tensor] = {}
    sizes: list[int] = []
    if sum(images):
        inputs, sizes = _images(kind, images, generator, dtype, alike=alike)
    video_sizes: list[list[int]] = []
    if videos:
        more, video_sizes = _videos(kind, videos, generator, dtype)
        inputs |= more
    rows: list[list[int]] = []
    image, video = iter(sizes), iter(video_sizes)
    for example in examples:
        row: list[int] = []
        for part in example:
            if part == "i":
                row += [IMAGE] * next(image)
            elif part == "v":
                for frame in next(video):  # Qwen 3 writes the time before each
                    row += [3, *[VIDEO] * frame]
            else:
                row += torch.randint(3, 90, (int(part),), generator=generator).tolist()
        rows.append(row)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [2] * (longest - len(row)) for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    if kind.startswith("qwen") and kind not in SOUND:
        inputs["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO)
    if kind == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if kind == "paligemma":  # its prompt, up to the token behind the last image
        last = torch.tensor(
            [
                max((at for at, token in enumerate(row) if token == IMAGE), default=-1)
                for row in rows
            ]
        )
        inputs["token_type_ids"] = (torch.arange(longest) > last[:, None] + 1).long()
    if not bool(real.all()):
        inputs["attention_mask"] = real
    labels = ids.masked_fill((ids == IMAGE) | (ids == VIDEO) | (real == 0), -100)
    return {"input_ids": ids, "labels": labels, **inputs}


def _images(
    kind: str,
    per_example: list[int],
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    alike: bool,
) -> tuple[dict[str, Tensor], list[int]]:
    count = sum(per_example)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    numbers = [0 if alike else number for number in range(count)]
    cycle = lambda values: [values[number % len(values)] for number in numbers]  # noqa: E731
    match kind:
        case "llava" | "llava-indexed":
            return {"pixel_values": random(count, 3, 8, 8)}, [4] * count
        case "paligemma":
            return {"pixel_values": random(count, 3, 8, 8)}, [4] * count
        case "internvl" | "gemma3" | "llama4":
            return {"pixel_values": random(count, 3, 16, 16)}, [4] * count
        case "voxtral":
            return {"input_features": random(count, 8, 24)}, [3] * count
        case "audioflamingo3" | "qwen2_audio":
            steps = cycle([24, 17, 5])
            name = (
                "input_features_mask"
                if kind == "audioflamingo3"
                else "feature_attention_mask"
            )
            inputs = {"input_features": random(count, 8, 24)}
            inputs[name] = (torch.arange(24) < torch.tensor(steps)[:, None]).long()
            return inputs, [((each - 1) // 2 + 1) // 2 for each in steps]
        case "mistral3" | "llava-pixtral":
            sizes = cycle(_SIZES)
            side = 8 if kind == "mistral3" else 4
            pixels = random(count, 3, *(_SIZES[0] if alike else (16, 16)))
            for image, (height, width) in enumerate(sizes):
                pixels[image, :, height:], pixels[image, :, :, width:] = 0, 0
            return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}, [
                h * w // side**2 for h, w in sizes
            ]
        case "smolvlm" | "idefics3":
            most = max(per_example)
            pixels = random(len(per_example), most, 3, 16, 16)
            mask = torch.ones(len(per_example), most, 16, 16, dtype=torch.bool)
            for example, number in enumerate(per_example):
                pixels[example, number:] = 0
                # the second image of each is narrower
                mask[example, 1:2, :, 16 if alike else 12 :] = False
            return {"pixel_values": pixels, "pixel_attention_mask": mask}, [4] * count
        case "llava_onevision":
            sizes = cycle(_ORIGINALS)
            # an image of 8 x 16 has three
            tiles = random(count, 3 if alike else 5, 3, 8, 8)
            numbers = torch.tensor(per_example)
            inputs = {
                "pixel_values": tiles,
                "image_sizes": torch.tensor(sizes),
                "batch_num_images": numbers,
            }
            made = (
                build(kind, dtype=dtype)
                .get_image_features(**inputs, return_dict=True)
                .pooler_output
            )
            return inputs, [len(each) for each in made]
        case _:
            grids = cycle(_GRIDS)
            patches = sum(t * h * w for t, h, w in grids)
            inputs = {
                "pixel_values": random(patches, 96),
                "image_grid_thw": torch.tensor(grids),
            }
            return inputs, [t * h * w // 4 for t, h, w in grids]


def _videos(
    kind: str, count: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The inputs, and the tokens of each run of a video's."""
    if kind == "llava_onevision":
        pixels = torch.randn(count, 5, 3, 8, 8, generator=generator, dtype=dtype)
        return {"pixel_values_videos": pixels}, [
            [5 + 1]
        ] * count  # a token for a frame, and the break
    grids = [_VIDEO_GRIDS[number % 2] for number in range(count)]
    patches = sum(t * h * w for t, h, w in grids)
    inputs = {
        "pixel_values_videos": torch.randn(
            patches, 96, generator=generator, dtype=dtype
        ),
        "video_grid_thw": torch.tensor(grids),
    }
    if kind == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([2.0, 1.0])[:count]
    one_run = not kind.startswith("qwen3")
    return inputs, [
        [t * h * w // 4] if one_run else [h * w // 4] * t for t, h, w in grids
    ]


def one_process(kind: str, batch: Any, dtype: torch.dtype = torch.float64) -> Any:
    model = build(kind, dtype=dtype)
    logits = model(
        **{name: value for name, value in batch.items() if name != "labels"}
    ).logits
    # theirs is of float32
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "logits": logits.detach(), "gradients": gradients}
