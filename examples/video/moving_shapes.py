"""Train a small model on videos of a moving square, and ask it, after the last frame, what it saw in an early one.

    python examples/video/moving_shapes.py                                # one process
    torchrun --nproc-per-node 2 examples/video/moving_shapes.py           # a ring of two

Each video is made on the spot: a grey square moves over a black field, and in one of its first frames it has a colour.
The question comes behind the last frame, so its answer may lie on another rank than the frame that it is about. The
tower's work is shared out too: each rank computes the embeddings of its share of the frames. The first steps are done
again by transformers alone, in each process, and must have the same losses.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

import ringspan as rs

COLOURS = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "white": (1.0, 1.0, 1.0),
}
PAD, END, ASK, VIDEO, FIRST = 0, 1, 2, 3, 8  # tokens; colours from FIRST on
# pixels of a patch, patches of a frame's side; 2 x 2 patches become one token
PATCH, SIDE = (
    4,
    4,
)
CHECKED_STEPS = 3
RATE = 2e-3


def tiny_model() -> Any:
    """Qwen2.5-VL with two layers of each kind."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    text = sizes | {
        "vocab_size": FIRST + len(COLOURS),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 1e4,
        },
        "pad_token_id": PAD,
        "bos_token_id": END,
        "eos_token_id": END,
    }
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PATCH,
    }
    tower |= {"out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text,
        vision_config=tower,
        video_token_id=VIDEO,
        image_token_id=4,
    )
    model = AutoModelForImageTextToText.from_config(config)
    # wider than large models begin: so small a one finds the frame in fewer steps
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model


def videos(
    count: int, frames: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """``count`` videos (count, frames, 3, height, width), and which colour each shows early."""
    side = SIDE * PATCH
    answers = torch.randint(len(COLOURS), (count,), generator=generator)
    shown = torch.randint(max(1, frames // 4), (count,), generator=generator)
    start = torch.randint(side, (count, 2), generator=generator)
    made = torch.zeros(count, frames, 3, side, side)
    palette = torch.tensor([*COLOURS.values()])
    for video in range(count):
        for frame in range(frames):
            top, left = ((start[video] + frame) % (side - 5)).tolist()
            colour = (
                palette[answers[video]]
                if frame == shown[video]
                else torch.full((3,), 0.3)
            )
            made[video, frame, :, top : top + 6, left : left + 6] = colour[
                :, None, None
            ]
    return made, answers


def patches_of(pixels: Tensor) -> Tensor:
    """The rows that Qwen's processor makes of one video (frames, 3, height, width): each frame twice, patches in blocks
    of 2 x 2.
    """
    blocks = SIDE // 2
    cut = pixels.reshape(-1, 3, blocks, 2, PATCH, blocks, 2, PATCH).permute(
        0, 2, 5, 3, 6, 1, 4, 7
    )
    return (
        cut[..., None, :, :]
        .expand(*cut.shape[:6], 2, PATCH, PATCH)
        .reshape(-1, 3 * 2 * PATCH**2)
    )


def batch_of(count: int, frames: int, seed: int) -> dict[str, Tensor]:
    """What a processor would return: frames, a question, and the colour as the only target."""
    pixels, answers = videos(count, frames, torch.Generator().manual_seed(seed))
    tokens = torch.full((count, frames * (SIDE // 2) ** 2), VIDEO)
    question = torch.tensor([[ASK]]).expand(count, -1)
    ids = torch.cat(
        (torch.full((count, 1), END), tokens, question, FIRST + answers[:, None]), 1
    )
    labels = torch.full_like(ids, -100)
    labels[:, -1] = ids[:, -1]
    return {
        "input_ids": ids,
        "labels": labels,
        "mm_token_type_ids": 2 * (ids == VIDEO).int(),
        "pixel_values_videos": torch.cat([patches_of(video) for video in pixels]),
        "video_grid_thw": torch.tensor([[frames, SIDE, SIDE]] * count),
        "second_per_grid_ts": torch.ones(count),
    }


def losses_alone(steps: int, frames: int, batch: int) -> list[float]:
    """The losses of the first steps by transformers, on this process alone."""
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    found: list[float] = []
    for step in range(steps):
        loss = model(**batch_of(batch, frames, seed=step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on moving shapes, ask about an early frame."
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--frames", type=int, default=16, help="of each video")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--output", default="runs/video", help="folder for the model")
    given = parser.parse_args()
    mesh = rs.init_mesh(ring=int(os.environ.get("WORLD_SIZE", "1")))
    model = rs.parallelize(tiny_model().train(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    found: list[float] = []
    for step in range(given.steps):
        loss = model(
            **rs.shard_batch(batch_of(given.batch, given.frames, seed=step), mesh)
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    expected = losses_alone(min(CHECKED_STEPS, given.steps), given.frames, given.batch)
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=False))
    model.eval()
    with torch.no_grad():
        asked = batch_of(64, given.frames, seed=10**6)
        after = float(model(**rs.shard_batch(asked, mesh)).loss)
    model.save_pretrained(given.output)
    if dist.get_rank() == 0:
        plain = AutoModelForImageTextToText.from_pretrained(given.output).eval()
        answers = asked["input_ids"][:, -1]
        with torch.no_grad():
            inputs = {name: value for name, value in asked.items() if name != "labels"}
            said = plain(**inputs).logits[:, -2].argmax(-1)
        print(
            f"loss {found[0]:.3f} -> {after:.3f}; {float((said == answers).float().mean()):.0%} of 64 new videos "
            f"answered right; first losses within {worst:.0e} of one process; model in {Path(given.output).resolve()}"
        )
    dist.barrier()


if __name__ == "__main__":
    main()
