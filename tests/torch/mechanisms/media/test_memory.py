"""What towers keep for backward falls with the number of ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.cases import long
from tests.torch.mechanisms.media.models import VIDEO, build

SIDE = 4


def video(kind: str, frames: int) -> dict[str, Tensor]:
    per_frame = SIDE**2 // 4
    runs = (
        [[VIDEO] * per_frame + [3]] * frames
        if kind == "qwen3_vl"
        else [[VIDEO] * per_frame * frames]
    )
    ids = torch.tensor([[4, 5, *(token for run in runs for token in run), 6, 7]])
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == VIDEO, -100),
        "mm_token_type_ids": 2 * (ids == VIDEO),
        "pixel_values_videos": torch.randn(frames * SIDE**2, 96),
        "video_grid_thw": torch.tensor([[frames, SIDE, SIDE]]),
    }


def saved_bytes(mesh: DeviceMesh, kind: str, frames: int) -> int:
    kept: dict[int, Tensor] = {}  # by address, and held: none is given out again
    is_inside = False
    model: Any = build(kind, dtype=torch.float32)

    def enter(*_: Any) -> None:
        nonlocal is_inside
        is_inside = True

    def leave(*_: Any) -> None:
        nonlocal is_inside
        is_inside = False

    def note(x: Tensor) -> Tensor:
        is_weight = isinstance(x if x._base is None else x._base, nn.Parameter)
        if is_inside and not is_weight:
            # a share of the pixels is a view of all of them
            kept.setdefault(x.data_ptr(), x)
        return x

    model.model.visual.register_forward_pre_hook(enter)
    model.model.visual.register_forward_hook(leave)
    model = rs.parallelize(model, mesh, checkpoint="none")
    with saved_tensors_hooks(note, lambda x: x):
        loss = model(**rs.shard_batch(video(kind, frames), mesh)).loss
    found = sum(x.nbytes for x in kept.values())
    loss.backward()
    return found


@pytest.mark.parametrize("kind", [*long("qwen2_5_vl"), "qwen3_vl"])
def test_a_rank_keeps_its_share_of_the_frames(pool, kind):
    """Of 24 more frames, beside what does not depend on them."""

    def of_more(ranks: int) -> list[int]:
        many, few = (pool.run(saved_bytes, ranks, kind, frames) for frames in (48, 24))
        return [more - less for more, less in zip(many, few, strict=True)]

    (whole,) = of_more(1)
    assert of_more(3) == pytest.approx([whole / 3] * 3, rel=0.01)
