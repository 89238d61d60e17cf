"""Models that see or hear as the planner counts them: held to what a real forward and backward pass does."""

from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ringspan as rs
from ringspan.core.errors import ConfigError, RingspanError, UnsupportedError
from ringspan.core.geometry.layer_mask import CAUSAL
from ringspan.measure.trace.dry_run import hugging_face_config
from ringspan.plan.cluster.hardware import DEVICES
from ringspan.plan.cost.cost import model_flops, step_cost
from ringspan.plan.cost.kept import pixel_bytes, seen_bytes
from ringspan.plan.cost.memory import training_memory
from ringspan.plan.cost.setting import Setting
from ringspan.plan.documents import compare_layouts
from ringspan.plan.generation.planner import TextQuestion
from ringspan.plan.model.configs import from_config, model_shape
from ringspan.plan.model.kinds import Growth
from ringspan.plan.model.media import NO_MEDIA, Media, read_media
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.planner import make_plan
from ringspan.plan.search import Question
from ringspan.torch.data.media.cuts import pieces_of
from ringspan.torch.data.media.kind import Modality
from ringspan.torch.mechanisms.media.kinds import kind_of
from ringspan.torch.mechanisms.media.towers import SharedTowers, share_out
from ringspan.torch.model.layers.decoder import inner_of
from ringspan.torch.model.view import view_of
from tests.cases import few
from tests.torch.mechanisms.media.models import KINDS, SOUND, batch_of, build

REFUSED = {"paligemma": "prompt sees itself both ways"}
# whose experts' products are all batched
PLANNED = [kind for kind in KINDS if kind not in {*REFUSED, "llama4"}]
VIDEO = [
    kind
    for kind in PLANNED
    if kind == "llava_onevision" or (kind.startswith("qwen") and kind not in SOUND)
]
# Sizes of the images that ``batch_of`` makes alike; of other models those of their config.
SIZES = {"mistral3": "x16x8", "llava-pixtral": "x16x8", "llava_onevision": "x8x16"}
FIVE: list[list[int | str]] = [[3, "i", 2, "i", 1, "i", 1, "i", 2, "i", 4]]


def five_of(kind: str) -> list[list[int | str]]:
    """Examples with five images; LLaVA-OneVision tiles an image that is alone in its example."""
    return [[3, "i", 2]] * 5 if kind == "llava_onevision" else FIVE


def media_of(kind: str, units: int = 5) -> Media:
    if kind in SOUND:
        return read_media(None, None, units)
    return read_media(
        f"{units}{SIZES.get(kind, 'x16x16' if kind.startswith('qwen') else '')}",
        None,
        None,
    )


def video_of(kind: str) -> Media:
    return read_media(None, "5" if kind == "llava_onevision" else "6x16x8", None)


def shape_of(kind: str, media: Media = NO_MEDIA, dtype: str = "float32") -> ModelShape:
    return from_config(
        build(kind, dtype=torch.float32).config.to_dict(), kind, media, dtype
    )


@lru_cache
def five(kind: str) -> ModelShape:
    """Of sequences with five images, or windows of sound."""
    return shape_of(kind, media_of(kind))


def compute_of(model: Any, modality: Modality) -> Any:
    kind = kind_of(view_of(model))
    assert kind is not None
    if kind.features is not None:
        return lambda **inputs: kind.features(inner_of(model), **inputs)
    return getattr(inner_of(model), f"get_{modality.name}_features")


def counted_flops(model: Any, batch: Any, modality: Modality) -> int:
    """Forward and backward of a tower, by torch's counter; eager attention is products that it knows."""
    model.set_attn_implementation("eager")
    given = {name: batch[name] for name in modality.cut.names if name in batch}
    with FlopCounterMode(display=False) as counter:
        output = compute_of(model, modality)(**given, return_dict=True)
        made = [*pieces_of(output.pooler_output)]
        made += [
            piece
            for each in getattr(output, "deepstack_features", None) or ()
            for piece in pieces_of(each)
        ]
        torch.autograd.backward(made, [torch.ones_like(piece) for piece in made])
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", few(PLANNED, 6))
def test_parameters_and_flops_are_those_of_the_model(kind):
    shape, model = five(kind), build(kind, dtype=torch.float32)
    batch = batch_of(kind, five_of(kind), dtype=torch.float32, alike=True)
    (tower,), modality = shape.towers, kind_of(view_of(model)).modalities[0]  # pyright: ignore[reportOptionalMemberAccess]
    assert shape.parameters == model.num_parameters()
    assert tower.flops.at(5) == counted_flops(model, batch, modality)
    assert (tower.units, tower.tokens) == (5, int((batch["input_ids"] == 95).sum()))
    assert tower.pixels == batch[modality.cut.pixels].numel()
    if "moe" in kind:
        model.set_experts_implementation("eager")  # products that the counter knows
    ids = torch.full((1, 24), 5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    convolved = sum(each.channels * each.taps for each in shape.kinds)
    counts = counter.get_flop_counts()["Global"]
    products = sum(
        counts.get(operator, 0)
        for operator in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )
    assert products == 2 * 24 * (shape.matrix_parameters - convolved), counts


@pytest.mark.parametrize("kind", few(VIDEO, 6))
def test_frames_cost_what_those_of_a_video_do(kind):
    shape, model = shape_of(kind, video_of(kind)), build(kind, dtype=torch.float32)
    batch = batch_of(kind, [[4, "v", 3]], dtype=torch.float32)
    (tower,), modality = shape.towers, kind_of(view_of(model)).modalities[1]  # pyright: ignore[reportOptionalMemberAccess]
    assert tower.flops.at(tower.units) == counted_flops(model, batch, modality)
    assert (tower.units, tower.tokens) == (
        5 if kind == "llava_onevision" else 3,
        int((batch["input_ids"] == 96).sum()),
    )
    assert tower.pixels == batch[modality.cut.pixels].numel()


class SentRows(TorchDispatchMode):
    """Counts what this rank gives to all-to-alls."""

    bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket == torch.ops.c10d.alltoall_base_:
            self.bytes += args[1].nbytes
        return func(*args, **kwargs or {})


def passed(mesh: DeviceMesh, kind: str, checkpoint: Any) -> tuple[int, int]:
    """Bytes that this rank keeps for the backward pass of towers, and gives to others as embeddings."""
    batch = batch_of(kind, five_of(kind), dtype=torch.float32, alike=True)
    given = {x.untyped_storage().data_ptr() for x in batch.values()}
    model: Any = rs.parallelize(
        build(kind, dtype=torch.float32), mesh, checkpoint=checkpoint
    )
    buffers = {x.untyped_storage().data_ptr() for x in model.buffers()}
    kept: dict[tuple[int, int], Tensor] = {}

    def note(x: Tensor) -> Tensor:
        at = x.untyped_storage().data_ptr()
        if (
            not isinstance(x if x._base is None else x._base, nn.Parameter)
            and at not in buffers
        ):
            # A share of the pixels is a view of all of them here, and a copy on a device.
            kept.setdefault((at, x.data_ptr() if at in given else 0), x)
        return x

    def noted(*args: Any) -> Any:
        with saved_tensors_hooks(note, lambda x: x):
            return make(*args)

    make = SharedTowers.make
    with patch.object(SharedTowers, "make", noted), SentRows() as sent:
        loss = model(**rs.shard_batch(batch, mesh)).loss
    loss.backward()
    sizes = [
        x.nbytes if at in given else x.untyped_storage().nbytes()
        for (at, _), x in kept.items()
    ]
    return sum(sizes), sent.bytes


@pytest.mark.parametrize(
    ("number", "kind", "checkpoint"),
    few(
        [
            (number, kind, ("none", "attention")[number % 2])
            for number, kind in enumerate(PLANNED)
        ],
        10,
    ),
)
def test_what_a_rank_keeps_and_sends_is_predicted_to_the_byte(
    pool, number, kind, checkpoint
):
    ranks = 1 + number % 3
    (tower,) = five(kind).towers
    growth = tower.saved if checkpoint == "none" else tower.checkpointed
    shares = [len(share) for share in share_out([1] * 5, ranks)]
    sent = [
        share * tower.tokens // 5 * tower.row * 4 if ranks > 1 else 0
        for share in shares
    ]
    expected = [
        (growth.at(share), rows) for share, rows in zip(shares, sent, strict=True)
    ]
    assert pool.run(passed, ranks, kind, checkpoint) == expected
    assert max(shares) == tower.share(1, ranks)


def question(shape: ModelShape, length: int = 1 << 17, **others: Any) -> Question:
    return Question(
        shape=shape, device=DEVICES["h100-80gb"], devices=8, length=length, **others
    )


def test_what_towers_keep_falls_with_the_ring():
    """And pixels, which the host has whole, do not."""
    shape = shape_of("qwen2_5_vl", read_media(None, "960x16x8", None), "bfloat16")
    kept = [
        seen_bytes(shape, Setting(length=1 << 12, ring=ring)) for ring in (1, 2, 4, 8)
    ]
    assert kept == [kept[0] // ring for ring in (1, 2, 4, 8)]
    assert (
        len({pixel_bytes(shape, Setting(length=1 << 12, ring=ring)) for ring in (1, 8)})
        == 1
    )
    without = shape_of("qwen2_5_vl")
    setting = Setting(length=1 << 12, ring=4, on_gpu=False)
    more = (
        training_memory(shape, setting).bytes["activations"]
        - training_memory(without, setting).bytes["activations"]
    )
    assert more == kept[2] + 4 * 480 * 8 * 96  # on a CPU the device is the host


def test_a_plan_counts_towers_and_says_what_they_take():
    shape = shape_of("qwen2_5_vl", read_media(None, "960x16x8", None), "bfloat16")
    plan = make_plan(question(shape, 1 << 12))
    alone = make_plan(question(shape_of("qwen2_5_vl"), 1 << 12))
    (tower,) = shape.towers
    assert plan.cost.flops - alone.cost.flops == tower.units * tower.flops.at(1)
    result, share = plan.as_json()["towers"], -(-480 // plan.setting.ring)
    assert result["inputs"] == [
        {
            "modality": "video",
            "units": 480,
            "units_per_rank": share,
            "tokens": 960,
            "flops": 480 * tower.flops.at(1),
        }
    ]
    assert result["pixel_bytes_on_host"] == 4 * 480 * 8 * 96
    assert any("make 960 of 4,096 tokens" in reason for reason in plan.reasons)
    assert any("which rest without --images" in reason for reason in alone.reasons)
    assert (
        "towers"
        not in make_plan(question(model_shape("qwen3-0.6b"), 1 << 12)).as_json()
    )


@pytest.mark.long
def test_more_frames_take_longer_and_a_larger_ring_less():
    device = DEVICES["h100-80gb"]
    few = shape_of("qwen3_vl", read_media(None, "480x16x8", None))
    many = replace(
        few, towers=tuple(replace(tower, units=2 * tower.units) for tower in few.towers)
    )

    def seconds(shape: ModelShape, ring: int) -> float:
        return step_cost(
            shape, Setting(length=1 << 12, ring=ring), device, 1
        ).compute_seconds

    assert seconds(many, 2) > seconds(few, 2)
    assert seconds(many, 8) < seconds(many, 2)


@pytest.mark.long
def test_tokens_of_an_image_see_its_later_ones_once():
    shape, blocks = five("gemma3"), tuple((at, at + 4) for at in range(0, 20, 4))
    places = np.arange(24)
    causal, both = (
        int(CAUSAL.in_text(24, None, each).dense(places, places).sum())
        for each in ((), blocks)
    )
    assert shape.later_pairs == both - causal == 30
    plain = replace(shape, later_pairs=0)
    assert (
        model_flops(shape, 24) - model_flops(plain, 24)
        == 12 * 30 * shape.attention.out_size * shape.layers
    )


def test_a_growth_goes_through_what_was_measured():
    assert [Growth.through(7, 9).at(count) for count in (0, 1, 2, 3, 10)] == [
        0,
        5,
        7,
        9,
        23,
    ]
    assert [Growth.through(11, 20, 33).at(count) for count in (1, 2, 3, 4, 5)] == [
        6,
        11,
        20,
        33,
        50,
    ]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_planner_does_not_count_is_refused_by_name(kind):
    with pytest.raises(UnsupportedError, match=REFUSED[kind]) as caught:
        shape_of(kind, media_of(kind))
    assert kind in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "images", "frames", "sound", "message"),
    [
        (
            "qwen3_vl",
            "4",
            None,
            None,
            "--images 4: qwen3_vl_vision takes any size that 8 divides; give it too",
        ),
        (
            "qwen3_vl",
            None,
            "4x12x16",
            None,
            "--frames 4x12x16: the tower takes heights and widths that 8 divides",
        ),
        ("mistral3", "4x12x16", None, None, "--images 4x12x16: .* here to about 16x16"),
        (
            "gemma3",
            "4x8x8",
            None,
            None,
            "--images 4x8x8: gemma3 takes images, or tiles, of 16 x 16; give their",
        ),
        (
            "gemma3",
            None,
            "4",
            None,
            r"--frames: gemma3 \(gemma3\) does not take it; it takes --images",
        ),
        ("voxtral", "1", None, None, "--images: voxtral .* it takes --sound"),
        (
            "gemma3",
            "4x8",
            None,
            None,
            "--images 4x8: give COUNT, or COUNTxHEIGHTxWIDTH in pixels",
        ),
        ("gemma3", "0", None, None, "--images 0: give COUNT"),
    ],
)
def test_images_that_a_model_does_not_take_are_refused(
    kind, images, frames, sound, message
):
    with pytest.raises(ConfigError, match=message):
        shape_of(kind, read_media(images, frames, sound))


def test_what_is_planned_for_text_alone_is_refused():
    shape, device = five("llava"), DEVICES["h100-80gb"]
    for ask in (
        lambda: TextQuestion(
            shape=shape, device=device, devices=2, prompt=8, new_tokens=8
        ),
        lambda: compare_layouts(
            question(shape, 64), Setting(length=64, ring=2), (32, 32)
        ),
        lambda: hugging_face_config(shape, 64),
        lambda: shape.split(2),
    ):
        with pytest.raises(RingspanError, match="llava"):
            ask()
    with pytest.raises(
        ConfigError,
        match=r"--length 16: what it holds \(5 of image\) makes 20 tokens alone",
    ):
        make_plan(question(shape, 16))
    with pytest.raises(
        ConfigError, match=r"--images: qwen3-0\.6b is a model of text alone"
    ):
        model_shape("qwen3-0.6b", read_media("4", None, None))
