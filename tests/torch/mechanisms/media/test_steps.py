"""Several steps of models that see: batches without images, evaluation in between, frozen parts, folders."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

import ringspan as rs
from tests.cases import long
from tests.every_model.weights import there_and_back
from tests.torch.mechanisms.media.models import batch_of, build
from tests.torch.mechanisms.media.test_training import MANY, NONE, VIDEOS
from tests.torch.models import relative, whole

STEPS = ((MANY, NONE), (NONE, VIDEOS))  # each of two micro-steps
RATE = 1e-2


def batches(kind: str) -> list[list[Any]]:
    steps = [
        [[part for part in each if part != "v"] for each in micro]
        for step in STEPS
        for micro in step
    ]
    found = [
        batch_of(kind, examples, seed=number) for number, examples in enumerate(steps)
    ]
    return [found[place : place + 2] for place in range(0, len(found), 2)]


def counted(step: list[Any]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)


def froze(model: Any, words: tuple[str, ...]) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in words))
    return model


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=RATE
    )


def one_process(kind: str, frozen: tuple[str, ...]) -> Any:
    model = froze(build(kind), frozen)
    optimizer, losses = optimizer_of(model), []
    for step in batches(kind):
        total = torch.zeros((), dtype=torch.float64)
        for batch in step:
            # of the batch before, which transformers would go on with
            model.base_model.rope_deltas = None
            logits = model(
                **{name: value for name, value in batch.items() if name != "labels"}
            ).logits
            targets = batch["labels"][:, 1:].flatten()
            loss = cross_entropy(
                logits[:, :-1].flatten(0, 1), targets, reduction="sum"
            ) / counted(step)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.stack(losses), {
        name: weight.detach() for name, weight in model.named_parameters()
    }


def on_ring(mesh: DeviceMesh, kind: str, frozen: tuple[str, ...], options: Any) -> Any:
    model: Any = rs.parallelize(froze(build(kind), frozen), mesh, **options)
    optimizer, losses = optimizer_of(model), []
    for step in batches(kind):
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(step):
            model.eval()
            with torch.inference_mode() if number else torch.no_grad():
                model(**rs.shard_batch(batch, mesh))
            prompt = {
                name: value
                for name, value in batch.items()
                if name not in ("labels", "attention_mask")
            }
            model.generate(**prompt, max_new_tokens=2, pad_token_id=2)
            model.train()
            loss = model(
                **rs.shard_batch(batch, mesh), num_items_in_batch=counted(step)
            ).loss
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.stack(losses), {
        name: whole(weight.detach()) for name, weight in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "frozen", "options"),
    [
        (
            "llava",
            3,
            ("vision_tower", "projector"),
            {"layers_per_checkpoint": 2, "offload": "activations"},
        ),
        *long(
            (
                "qwen2_5_vl",
                2,
                (),
                {"checkpoint": "full", "feedforward_chunk_tokens": 4},
            ),
            ("qwen3_vl", 2, ("language_model.layers",), {"checkpoint": "none"}),
        ),
    ],
)
def test_steps_with_evaluation_between_equal_one_process(
    pool, kind, ranks, frozen, options
):
    losses, weights = one_process(kind, frozen)
    for found, ours in pool.run(on_ring, ranks, kind, frozen, options):
        assert relative(found, losses) < 1e-9
        for name, weight in weights.items():
            # AdamW's first steps are those of signs: where a gradient is rounding, they may be any.
            assert (
                float((ours[name] - weight).norm()) < 1e-5 * float(weight.norm()) + 1e-6
            ), name


def read(mesh: DeviceMesh, folder: str, kind: str) -> Any:
    model = rs.from_pretrained(folder, mesh, dtype=torch.float64)
    with torch.no_grad():
        return model(**rs.shard_batch(batch_of(kind, MANY), mesh)).loss


def test_a_folder_gives_its_language_model_as_transformers_does(pool, tmp_path):
    build("qwen3_5_moe", dtype=torch.float32).save_pretrained(tmp_path / "given")
    wrong = pool.run(
        there_and_back, 2, str(tmp_path / "given"), str(tmp_path / "saved")
    )
    assert wrong == [{}] * 2


@pytest.mark.parametrize("kind", ["qwen3_vl", *long("llava", "audioflamingo3")])
def test_a_folder_gives_the_model_with_its_towers(pool, kind, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    batch = batch_of(kind, MANY)
    logits = model(
        **{name: value for name, value in batch.items() if name != "labels"}
    ).logits
    expected = cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    for loss in pool.run(read, 2, str(tmp_path), kind):
        assert relative(loss, expected) < 1e-9
