"""GRPO of a model that sees, whose completions a server of vLLM makes: on rings as with TRL's own on one process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaConfig, LlavaForConditionalGeneration
from trl import (  # pyright: ignore[reportPrivateImportUsage]
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from ringspan.hf import RingConfig, RingGRPOTrainer, RingRLOOTrainer
from tests.cases import long
from tests.hf.fake_vllm import FakeVLLM, serving
from tests.hf.test_vllm import close_ratios, trained
from tests.hf.trainers import arguments, close
from tests.train.conversations import COLOURS, CONFIG, SIDE, TEMPLATE, write_processor

ANSWER = "{% if add_generation_prompt %}assistant: {% endif %}"
KINDS = {
    "grpo": (GRPOConfig, GRPOTrainer, RingGRPOTrainer),
    "rloo": (RLOOConfig, RLOOTrainer, RingRLOOTrainer),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeVLLM]:
    folder = tmp_path / "model"
    folder.mkdir()
    template = TEMPLATE.replace("<end>", "").replace("<image>", "<image> and")
    write_processor(folder, template + ANSWER)
    fields = json.loads(json.dumps(CONFIG))
    del fields["model_type"]
    fields["text_config"]["initializer_range"] = 0.2
    torch.manual_seed(0)
    LlavaForConditionalGeneration(LlavaConfig(**fields)).save_pretrained(folder)
    with serving(folder) as found:
        yield found


def questions() -> datasets.Dataset:
    """Questions about one image and two, by turns."""
    rows = []
    for number in range(12):
        colours = [*COLOURS.values()][number % 2 :][: number % 2 + 1]
        pictures = [
            Image.new("RGB", (SIDE, SIDE + number), colour) for colour in colours
        ]
        asked = {"role": "user", "content": "what colour is this"}
        rows.append({"prompt": [asked], "images": pictures})
    return datasets.Dataset.from_list(rows)


def few_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) / (32 * len(ids)) for ids in completion_ids]


def trained_on_images(
    mesh: Any, kind: str, ring: dict[str, Any] | None, url: str, model: Path, rows: int
) -> Any:
    """What a trainer logs of some steps, and how far the server's numbers are from the trainer's."""
    config, plain, on_ring = KINDS[kind]

    def make(mesh: Any, _: str, ring: Any, folder: str, options: Any) -> Any:
        torch.manual_seed(0)
        given = {name: x for name, x in options.items() if name != "sampled"}
        own: dict[str, Any] = {
            "model": LlavaForConditionalGeneration.from_pretrained(
                model, dtype=torch.float32
            ),
            "args": arguments(folder, config, **given),
            "processing_class": AutoProcessor.from_pretrained(model),
            "reward_funcs": few_words,
            "train_dataset": questions(),
        }
        if ring is None:
            return plain(**own)
        return on_ring(**own, ring=RingConfig(mesh=mesh, **ring))

    options = {
        "bf16": False,
        "dataloader_drop_last": True,
        "max_completion_length": 6,
        # Biases of keys in the tower have no gradient but rounding, which Adam would divide by itself.
        "adam_epsilon": 0.1,
        "per_device_train_batch_size": rows,
    }
    return trained(mesh, make, ring, url, options)


@pytest.mark.parametrize(
    ("kind", "ranks", "replicate"),
    [("grpo", 2, 1), *long(("grpo", 3, 1), ("rloo", 2, 1), ("grpo", 4, 2))],
)
def test_steps_with_images_equal_one_process(world, server, kind, ranks, replicate):
    expected, ratios = trained_on_images(
        None, kind, None, server.url, server.folder, 2 * replicate
    )
    assert "/v1/chat/completions/render" in server.asked
    # Biases of the tower begin at 0: those of keys have no gradient but rounding, its last layer is not used.
    biases = [name for name, x in expected["weights"].items() if x.abs().max() < 1e-6]
    assert all("vision_tower" in name and "bias" in name for name in biases)
    for name in biases:
        del expected["weights"][name]
    assert len(expected["weights"]) > 40
    rows, server.rows = server.rows, 0
    server.reload(server.folder)
    asked = (kind, {}, server.url, server.folder, 2)
    for found, near in world(ranks).run(
        trained_on_images, ranks, *asked, replicate=replicate
    ):
        if replicate > 1:  # a mean of means over other batches
            found["entropy"] = expected["entropy"]
        # Answers are equally long, so a loss is 0 but for the rounding of advantages of 1; gradients are not.
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        found["loss"] = found["eval_loss"] = expected["loss"]
        close(found, expected)
        close_ratios(near, ratios, logs_none=kind == "rloo")
    # The two rows more tell the vocabulary.
    assert rows == server.rows - 1, "each replica asks once"
