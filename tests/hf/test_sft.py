"""TRL's SFTTrainer on a ring is the one on one process, and packed documents do not see each other."""

import tempfile
from functools import lru_cache
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.cases import long
from tests.hf.trainers import differences, made, sft, train

TOLERANCE = 1e-5
PACKED = {"packing": True}
FREE = {"padding_free": True, "max_length": None}


@lru_cache
def on_one_process(model: str, replicas: int, *options: tuple[str, Any]) -> dict[str, Any]:
    # TRL evaluates each process's batch by itself, and takes the mean.
    return train(None, sft, model, None, dict(options) | {"per_device_train_batch_size": 2 * replicas})


@pytest.mark.parametrize(
    ("ranks", "replicas", "options"),
    [
        (4, 2, PACKED),
        *long((2, 1, {}), (3, 1, PACKED), (4, 2, {"column": "completion_mask", "completion_only_loss": True})),
    ],
    ids=str,
)
def test_ten_steps_equal_one_process(world, ranks, replicas, options):
    expected = on_one_process("llama", replicas, *options.items())
    assert len(expected["loss"]) == len(expected["entropy"]) == 10 and len(expected["eval_loss"]) == 1
    for found in world(ranks).run(train, ranks, sft, "llama", {}, options, replicate=replicas):
        assert max(differences(found, expected).values()) < TOLERANCE


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", FREE | {"column": "completion_mask", "completion_only_loss": True, "lora": True}),
        ("gpt_oss", {}),  # sinks, windows and experts; on one process its packed documents see each other
        *long(
            ("llama", PACKED | {"packing_strategy": "wrapped"}),
            ("llama", PACKED | {"column": "assistant_masks"}),
            ("llama", PACKED | {"lora": True}),
            ("mixtral+router", PACKED | {"router_aux_loss_coef": 0.5}),
            ("llama", PACKED | {"pad_to_multiple_of": 8}),
            ("llama", {"loss_type": "dft"}),
            ("llama", {"train_sampling_strategy": "group_by_length"}),
            ("qwen3-window", PACKED),
            ("gemma2", PACKED),  # caps on scores and logits
            ("mixtral+router", {"router_aux_loss_coef": 0.0}),
        ),
    ],
    ids=str,
)
def test_what_is_packed_and_masked_equals_one_process(world, model, options):
    options = options | {"max_steps": 3}
    expected = on_one_process(model, 1, *options.items())
    for found in world(2).run(train, 2, sft, model, {}, options):
        assert max(differences(found, expected).values()) < TOLERANCE


def test_experts_on_two_rings_share_their_auxiliary_loss(world):
    options = PACKED | {"max_steps": 3}
    # Without the mean over steps, which are half as many on two rings.
    expected = on_one_process("mixtral+router", 2, *options.items()) | {"eval_entropy": []}
    for found in world(4).run(train, 4, sft, "mixtral+router", {}, options, replicate=2):
        assert max(differences(found, expected).values()) < TOLERANCE


def test_split_heads_and_vocabulary_equal_one_process(world):
    options = {"max_steps": 3}
    expected = on_one_process("llama", 1, *options.items())
    for found in world(4).run(train, 4, sft, "llama", {}, options, tp=2):
        assert max(differences(found, expected).values()) < TOLERANCE


def adapted(mesh: Any, folder: str, resume: str | None, packed: str | None) -> Any:
    """The losses of a run that trains an adapter and saves it; of packed weights where their folder is named."""
    options = {"lora": True, "packed": packed, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = sft(mesh, "llama", None if mesh is None else {}, folder, options)
    trainer.train(resume_from_checkpoint=resume)
    return {one["step"]: one["loss"] for one in trainer.state.log_history if "loss" in one}


@pytest.mark.parametrize("packed", [*long(False), True], ids=["float32", "int8"])
def test_an_adapter_resumes_on_another_ring_and_peft_opens_it(world, tmp_path, packed):
    weights = None
    if packed:
        pytest.importorskip("torchao")
        weights = str(tmp_path / "weights")
        made("llama").save_pretrained(weights)
    through = world(2).run(adapted, 2, str(tmp_path / "first"), None, weights)[0]
    assert through == pytest.approx(adapted(None, str(tmp_path / "alone"), None, weights), rel=1e-5)
    checkpoint = tmp_path / "first" / "checkpoint-2"
    assert PeftModel.from_pretrained(made("llama"), checkpoint).peft_config["default"].r == 4
    for losses in world(3).run(adapted, 3, str(tmp_path / "second"), str(checkpoint), weights):
        after = {step: loss for step, loss in losses.items() if step > 2}
        assert after == pytest.approx({3: through[3], 4: through[4]}, rel=1e-6)


def log_probabilities(mesh: Any, model: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of a packed batch, after another document was changed, and the documents."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = sft(mesh, model, {}, folder, PACKED | {"per_device_train_batch_size": 4})
        batch = next(iter(trainer.get_train_dataloader()))
        changed = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
        second = batch["seq_idx"] == 1
        changed["input_ids"][second] = 96 - changed["input_ids"][second]
        first, after = (trainer.model(**each, fused_lm_head=True).log_probs for each in (batch, changed))
        return first.detach(), after.detach(), batch["seq_idx"]


@pytest.mark.parametrize("model", ["gpt_oss", *long("llama", "gemma3_text")])
def test_a_packed_document_does_not_leak_into_others(world, model):
    for before, after, documents in world(3).run(log_probabilities, 3, model):
        assert documents.max() > 3
        others = (documents != 1)[:, :-1]
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[~others], after[~others])
