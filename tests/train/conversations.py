"""A tiny model that sees, its processor, and conversations about squares drawn on the spot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

WORDS = [
    "<pad>",
    "<end>",
    "<image>",
    "user:",
    "assistant:",
    "what",
    "colour",
    "is",
    "this",
]
WORDS += ["red", "green", "blue", "and", "then", "a", "square"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}<end>"
)
SIDE = 8  # of an image; patches of 4, so 4 tokens


def write_processor(folder: Path, template: str = TEMPLATE) -> Any:
    """A processor as LLaVA has it, with a word for a token."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<image>"],
    )
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        do_center_crop=True,
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    processor.save_pretrained(folder)
    return processor


COLOURS = {"red": (250, 20, 20), "green": (20, 250, 20), "blue": (20, 20, 250)}


def write_conversations(folder: Path, count: int) -> Path:
    """Questions about no image, one or two, by turns."""
    for name, colour in COLOURS.items():
        pixels = np.zeros((SIDE + 2, SIDE, 3), np.uint8)
        pixels[2:6, 1:5] = colour
        Image.fromarray(pixels).save(folder / f"{name}.png")
    lines = []
    for number in range(count):
        names = [[*COLOURS][(number + more) % 3] for more in range(number % 3)]
        parts = [{"type": "image", "path": f"{name}.png"} for name in names]
        question = [*parts, {"type": "text", "text": "what colour is this"}]
        answer = " and then ".join(names) or "a square"
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "talk.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "talk.jsonl"


CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "image_token_id": WORDS.index("<image>"),
    "text_config": {
        "model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": 4, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    },
}  # fmt: skip
