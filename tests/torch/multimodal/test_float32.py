"""Each model in float32 on rings of one to four: loss, gradients and new tokens of one process, wherever images are.

One model takes three batches of two examples, and then answers. ``make long`` tries the other rings too.
"""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.cases import long
from tests.torch.models import relative
from tests.torch.multimodal.models import IMAGE, KINDS, SOUND, VIDEO, Example, batch_of, build, one_process
from tests.torch.multimodal.test_generate import SETTINGS, padded_left
from tests.torch.multimodal.test_training import NONE, close
from tests.torch.test_parallelize import whole_gradients

BOUND = 1e-5
HAVE_VIDEO = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
SUITE = [("gemma3", 4), ("llava_onevision", 3), ("qwen2_audio", 2), ("qwen3_vl", 4)]
# Not of Qwen3.5, the gradients of whose decays are so small that one process disagrees with itself by more when it
# takes the examples one by one; test_training.py and test_generate.py have cases of it.
EVERY = [(kind, ranks) for kind in KINDS if not kind.startswith("qwen3_5") for ranks in (1, 2, 3, 4)]


def examples_of(kind: str) -> dict[str, list[Example]]:
    """Batches by how many ranks hold tokens of images."""
    spread: list[Example] = [[1, "i", 2, "i", 1, "i", 3], ["i", 2, "i", 4]]
    if kind in HAVE_VIDEO:
        spread = [[1, "i", 2, "v", 1, "i", 3], [1, "v", 2, "i", 4]]
    return {"some": [[*row_of(kind), 51], [7]], "all": spread, "none": NONE}


def row_of(kind: str) -> Example:
    """Two images in a row; Qwen's processors write a token between."""
    return ["i", 1, "i"] if kind.startswith("qwen") and kind not in SOUND else ["i", "i"]


def prompt_of(kind: str) -> Any:
    """Two prompts, padded on the left, of which one has no image."""
    first: Example = [*row_of(kind), *([1, "v"] if kind in HAVE_VIDEO else []), 9]
    return padded_left(kind, [first, [7]], torch.float32)


def on_ring(mesh: DeviceMesh, kind: str, batches: dict[str, Any], asked: Any) -> Any:
    """What this rank finds in each batch, and the answer to a prompt."""
    model: Any = rs.parallelize(build(kind, dtype=torch.float32), mesh)
    steps: dict[str, Any] = {}
    for name, batch in batches.items():
        part = rs.shard_batch(batch, mesh)
        model.zero_grad()
        loss = model(**part).loss
        loss.backward()
        gradients = {each: None if grad is None else grad.clone() for each, grad in whole_gradients(model).items()}
        is_held = bool(((part["input_ids"] == IMAGE) | (part["input_ids"] == VIDEO)).any())
        steps[name] = {"loss": loss.detach(), "gradients": gradients, "is_held": is_held}
    type(model).ring_prefill_tokens = 3
    answer = model.eval().generate(**asked, **SETTINGS)
    return steps, answer.sequences, torch.stack(answer.logits)


@pytest.mark.parametrize(("kind", "ranks"), [*SUITE, *long(*(case for case in EVERY if case not in SUITE))])
def test_images_on_some_all_and_no_ranks_and_an_answer(pool, kind, ranks):
    examples = examples_of(kind)
    batches = {name: batch_of(kind, each, dtype=torch.float32) for name, each in examples.items()}
    asked = prompt_of(kind)
    answer = build(kind, dtype=torch.float32).eval().generate(**asked, **SETTINGS)
    expected = {name: one_process(kind, batch, torch.float32) for name, batch in batches.items()}
    found = pool.run(on_ring, ranks, kind, batches, asked)
    holders = {name: sum(steps[name]["is_held"] for steps, *_ in found) for name in batches}
    assert holders["none"] == 0 and holders["all"] == ranks and (ranks == 1 or 0 < holders["some"] < ranks), holders
    for steps, sequences, logits in found:
        for name, step in steps.items():
            close(step, expected[name], BOUND)
        assert torch.equal(sequences, answer.sequences)
        assert relative(logits, torch.stack(answer.logits)) < BOUND
