"""Models that see images, on the ring against themselves on one process: loss, logits and every gradient."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.names import BatchLayoutName
from tests.cases import long
from tests.torch.mechanisms.media.models import (
    IMAGE,
    Example,
    batch_of,
    build,
    one_process,
)
from tests.torch.models import relative, whole_gradients

NONE: list[Example] = [[9, 4], [7]]
ONE: list[Example] = [[3, "i", 8]]
MANY: list[Example] = [[3, "i", 2, "i", 5], [1, "i", 1, "i", 4, "i", 2]]
IN_A_ROW: list[Example] = [[2, "i", "i", 9], [5, "i"]]
VIDEO: list[Example] = [[2, "v", 5, "i", 3]]
VIDEOS: list[Example] = [[4, "v", 1, "v", 3], [2, "i", 6]]


def ring_step(
    mesh: DeviceMesh,
    kind: str,
    examples: list[list[Example]],
    layout: BatchLayoutName,
    options: Any,
) -> Any:
    """A step of the batch that each replica has."""
    options = dict(options)
    dtype = options.pop("dtype", torch.float64)
    batch = batch_of(kind, examples[mesh["replicate"].get_local_rank()], dtype=dtype)
    if "routes" in options:
        batch["routes"] = options.pop("routes")
    model = rs.parallelize(build(kind, dtype=dtype), mesh, layout=layout, **options)
    out = model(**rs.shard_batch(batch, mesh, layout=layout))
    out.loss.backward()
    gradients = whole_gradients(model)
    with torch.no_grad():
        part = rs.shard_batch(
            {name: value for name, value in batch.items() if name != "labels"},
            mesh,
            layout=layout,
        )
        logits = model(**part).logits
    split = batch_layout(layout, batch["input_ids"].shape[1], mesh["ring"].size())
    logits = rs.unshard(logits, split, mesh["ring"].get_group(), 1)
    return {"loss": out.loss.detach(), "logits": logits, "gradients": gradients}


def close(found: Any, expected: Any, bound: float, real: Tensor | None = None) -> None:
    """Held to one process; a gradient that is nothing but rounding there, to all gradients together."""
    assert relative(found["loss"], expected["loss"]) < bound
    if real is not None:
        assert relative(found["logits"][real], expected["logits"][real]) < bound
    total = sum(
        float(gradient.norm()) ** 2
        for gradient in expected["gradients"].values()
        if gradient is not None
    )
    for name, gradient in found["gradients"].items():
        truth = expected["gradients"][name]
        if gradient is None or truth is None:
            assert gradient is None and truth is None, name
            continue
        error = float((gradient.double() - truth.double()).norm())
        assert error < bound * float(truth.norm()) + 1e-3 * bound * total**0.5, (
            name,
            error,
            float(truth.norm()),
        )


CASES = [
    # kind, ranks, examples, layout, options
    ("llava", 2, ONE, "zigzag", {}),  # one rank without any image
    *long(
        ("llava-pixtral", 2, MANY, "zigzag", {}),
        ("internvl", 3, MANY, "zigzag", {"layers_per_checkpoint": 2}),
        ("smolvlm", 2, [[4, 8], [3, "i", 2]], "zigzag", {}),
        ("llava_onevision", 3, VIDEOS, "zigzag", {}),
    ),
    ("qwen2_5_vl", 3, VIDEO, "striped", {"checkpoint": "full"}),
    *long(("qwen3_vl", 3, VIDEOS, "zigzag", {})),
    ("gemma3", 2, IN_A_ROW, "zigzag", {}),
    ("paligemma", 2, NONE, "zigzag", {}),
    *long(("qwen3_5", 2, VIDEOS, "zigzag", {"dtype": torch.float32})),
    ("audioflamingo3", 4, MANY, "striped", {}),
    pytest.param(
        *("llama4", 3, MANY, "zigzag", {"dtype": torch.float32}),
        marks=[
            pytest.mark.long,
            pytest.mark.skipif(
                Version(transformers.__version__) >= Version("5.24"),
                reason="transformers 5.24 reads outputs of Llama 4 that its text does not have",
            ),
        ],
    ),
    *long(
        ("llava", 3, IN_A_ROW, "striped", {"checkpoint": "none"}),
        ("qwen2_5_vl", 2, MANY, "zigzag", {}),
        ("qwen2_audio", 3, NONE, "zigzag", {}),
        ("llava", 4, MANY, "contiguous", {"checkpoint": "full"}),
        ("mistral3", 2, IN_A_ROW, "striped", {}),
        ("idefics3", 2, MANY, "zigzag", {}),
        ("llava_onevision", 2, [[3, "i", 8], [2, "i", "i", 2]], "zigzag", {}),
        ("qwen2_vl", 3, VIDEO, "zigzag", {}),
        ("gemma3", 2, MANY, "zigzag", {"route": "all-gather"}),
        ("paligemma", 3, IN_A_ROW, "striped", {}),
        ("qwen3_vl_moe", 3, VIDEOS, "zigzag", {"dtype": torch.float32}),
        ("qwen3_5_moe", 2, MANY, "zigzag", {"dtype": torch.float32}),
        ("voxtral", 3, MANY, "zigzag", {}),
        ("qwen2_audio", 2, MANY, "zigzag", {}),
    ),
]


@pytest.mark.parametrize(("kind", "ranks", "examples", "layout", "options"), CASES)
def test_the_ring_gives_the_loss_and_gradients_of_one_process(
    pool, kind, ranks, examples, layout, options
):
    dtype = options.get("dtype", torch.float64)
    batch = batch_of(kind, examples, dtype=dtype)
    expected = one_process(kind, batch, dtype)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    bound = 1e-6 if "gemma" in kind else 1e-9  # Gemma's norms are computed in float32
    # whose experts and states are not computed in float64
    bound = 1e-5 if dtype == torch.float32 else bound
    for found in pool.run(ring_step, ranks, kind, [examples], layout, options):
        close(found, expected, bound, real)


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        ("llava", [MANY, NONE]),
        *long(("qwen2_5_vl", [VIDEOS, ONE]), ("llava_onevision", [NONE, VIDEO])),
    ],
)
def test_replicas_without_images_train_the_towers_too(pool, kind, examples):
    """Their gradients are added up over replicas, whichever have images."""
    counts = [
        int((batch_of(kind, each)["labels"][:, 1:] != -100).sum()) for each in examples
    ]
    parts = [one_process(kind, batch_of(kind, each)) for each in examples]
    shares = [count / sum(counts) for count in counts]
    names = parts[0]["gradients"]

    def total(name: str) -> Tensor | None:
        given = [
            (part["gradients"][name], share)
            for part, share in zip(parts, shares, strict=True)
        ]
        there = [gradient * share for gradient, share in given if gradient is not None]
        return torch.stack(there).sum(0) if there else None

    loss = sum(part["loss"] * share for part, share in zip(parts, shares, strict=True))
    expected = {"loss": loss, "gradients": {name: total(name) for name in names}}
    for found in pool.run(ring_step, 4, kind, examples, "zigzag", {}, replicate=2):
        # norms are differentiated in float32, here of a part of the loss
        close(found, expected, 1e-6)


def packed_step(
    mesh: DeviceMesh, kind: str, layout: BatchLayoutName, batch: Any
) -> Any:
    model = rs.parallelize(build(kind), mesh, layout=layout)
    out = model(**rs.shard_batch(batch, mesh, layout=layout))
    out.loss.backward()
    return {"loss": out.loss.detach(), "gradients": whole_gradients(model)}


@pytest.mark.parametrize(
    ("kind", "layout"), [("qwen2_5_vl", "balanced"), ("gemma3", "zigzag")]
)
def test_packed_documents_have_their_own_images(pool, kind, layout):
    """Two rows, of which the first packs two documents: each counts, and sees, as if it were alone."""
    documents: list[Example] = [[3, "i", 4], [5, "i", 2, "i", 2], [2, "i", 30]]
    alone = batch_of(kind, documents)
    lengths = [int(row.sum()) for row in alone["attention_mask"]]
    # Two rows of equal length: the third document is the second row, cut or padded to it.
    rows = [
        torch.cat([alone["input_ids"][number, : lengths[number]] for number in (0, 1)])
    ]
    rows.append(alone["input_ids"][2, : len(rows[0])])
    assert len(rows[1]) == len(rows[0]), "the documents fit"
    targets = [
        alone["labels"][number, :length].clone()
        for number, length in enumerate(lengths)
    ]
    targets[1][0] = -100  # no document foretells the next one
    labels = torch.stack([torch.cat(targets[:2]), targets[2][: len(rows[0])]])
    positions = torch.stack(
        [
            torch.cat([torch.arange(lengths[0]), torch.arange(lengths[1])]),
            torch.arange(len(rows[0])),
        ]
    )
    names = [
        name
        for name in alone
        if name not in ("input_ids", "labels", "attention_mask")
        and "type_ids" not in name
    ]
    batch = {
        "input_ids": torch.stack(rows),
        "labels": labels,
        "position_ids": positions,
    }
    batch |= {name: alone[name] for name in names}
    if kind == "gemma3":
        batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    alone["input_ids"][2, len(rows[0]) :], alone["labels"][2, len(rows[0]) :] = 2, -100
    alone["labels"][:, 0] = -100
    expected = one_process(kind, alone)
    for found in pool.run(packed_step, 2, kind, layout, batch):
        close(found, expected, 1e-6 if kind == "gemma3" else 1e-9)
