"""TRL's SFTTrainer on a ring is the one on one process: packed documents see nothing of others, and states end."""

import tempfile
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.modeling_outputs import BaseModelOutput

from tests.cases import long
from tests.hf.trainers import TOLERANCE, check, close, differences, made, sft, train

PACKED = {"packing": True}
FREE = {"padding_free": True, "max_length": None}


@lru_cache
def on_one_process(
    model: str, replicas: int, *options: tuple[str, Any]
) -> dict[str, Any]:
    # TRL evaluates each process's batch by itself, and takes the mean.
    return train(
        None,
        sft,
        model,
        None,
        dict(options) | {"per_device_train_batch_size": 2 * replicas},
    )


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (
            "llama",
            FREE
            | {"column": "completion_mask", "completion_only_loss": True, "lora": True},
        ),
        *long(
            # sinks, windows and experts; on one process its packed documents see each other
            (
                "gpt_oss",
                {},
            ),
            ("llama", PACKED | {"packing_strategy": "wrapped"}),
            ("llama", PACKED | {"column": "assistant_masks"}),
            ("mixtral+router", PACKED | {"router_aux_loss_coef": 0.5}),
            ("gemma2", PACKED),  # caps on scores and logits
        ),
    ],
    ids=str,
)
def test_what_is_packed_and_masked_equals_one_process(world, model, options):
    options = options | {"max_steps": 3}
    expected = on_one_process(model, 1, *options.items())
    check(world, 2, sft, model, options, expected)


@pytest.mark.long
def test_experts_on_two_rings_share_their_auxiliary_loss(world):
    options = PACKED | {"max_steps": 3}
    # Without the mean over steps, which are half as many on two rings.
    expected = on_one_process("mixtral+router", 2, *options.items()) | {
        "eval_entropy": []
    }
    check(world, 4, sft, "mixtral+router", options, expected, replicate=2)


@pytest.mark.long
def test_split_heads_and_vocabulary_equal_one_process(world):
    options = {"max_steps": 2}
    expected = on_one_process("llama", 1, *options.items())
    check(world, 4, sft, "llama", options, expected, tp=2)


def compiled(mesh: Any, options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A run of compiled layers, and how many graph breaks they had."""
    torch.compiler.reset()
    counters.clear()
    return train(mesh, sft, "llama", {"compile": "aot_eager"}, options), sum(
        counters["graph_break"].values()
    )


@pytest.mark.long
def test_compiled_layers_equal_one_process(world):
    """Packed lengths differ from step to step."""
    options = PACKED | {"lora": True, "max_steps": 3}
    expected = on_one_process("llama", 1, *options.items())
    for found, breaks in world(2).run(compiled, 2, options):
        close(found, expected)
        assert breaks == 0


def adapted(mesh: Any, folder: str, resume: str | None, packed: str) -> Any:
    """The losses of a run that trains an adapter of the packed weights of a folder, and saves it."""
    options = {
        "lora": True,
        "packed": packed,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    trainer = sft(mesh, "llama", None if mesh is None else {}, folder, options)
    trainer.train(resume_from_checkpoint=resume)
    return {
        one["step"]: one["loss"] for one in trainer.state.log_history if "loss" in one
    }


def test_a_packed_adapter_resumes_on_another_ring(world, tmp_path):
    pytest.importorskip("torchao")
    weights = str(tmp_path / "weights")
    made("llama").save_pretrained(weights)
    through = world(2).run(adapted, 2, str(tmp_path / "first"), None, weights)[0]
    assert through == pytest.approx(
        adapted(None, str(tmp_path / "alone"), None, weights), rel=1e-5
    )
    checkpoint = tmp_path / "first" / "checkpoint-2"
    assert (
        PeftModel.from_pretrained(made("llama"), checkpoint).peft_config["default"].r
        == 4
    )
    for losses in world(4).run(
        adapted, 4, str(tmp_path / "second"), str(checkpoint), weights
    ):
        after = {step: loss for step, loss in losses.items() if step > 2}
        assert after == pytest.approx({3: through[3], 4: through[4]}, rel=1e-6)


def log_probabilities(
    mesh: Any, model: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of a packed batch, after another document was changed, and the documents."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = sft(
            mesh, model, {}, folder, PACKED | {"per_device_train_batch_size": 4}
        )
        batch = next(iter(trainer.get_train_dataloader()))
        changed = {
            name: value.clone() if torch.is_tensor(value) else value
            for name, value in batch.items()
        }
        second = batch["seq_idx"] == 1
        changed["input_ids"][second] = 96 - changed["input_ids"][second]
        first, after = (
            trainer.model(**each, fused_lm_head=True).log_probs
            for each in (batch, changed)
        )
        return first.detach(), after.detach(), batch["seq_idx"]


def test_a_packed_document_does_not_leak_into_others(world):
    for before, after, documents in world(2).run(log_probabilities, 2, "gpt_oss"):
        assert documents.max() > 3
        others = (documents != 1)[:, :-1]
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[~others], after[~others])


def read(model: Any, *, is_leaking: bool) -> None:
    """Let a decoder on one process read each packed document by itself, or all as one text. transformers' layers with a
    state do neither without CUDA kernels: they raise.
    """
    decoder = model.base_model
    plain = decoder.forward

    def forward(input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        assert len(input_ids) == 1
        starts = (
            [0] if is_leaking else (position_ids[0] == 0).nonzero().flatten().tolist()
        )
        assert is_leaking or len(starts) > 1
        places = pairwise([*starts, input_ids.shape[1]])
        hidden = [
            plain(input_ids=input_ids[:, start:end]).last_hidden_state
            for start, end in places
        ]
        return BaseModelOutput(last_hidden_state=torch.cat(hidden, 1))

    decoder.forward = forward


def packed(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    options = {"max_steps": 3, "packing": True} | options
    is_leaking = options.pop("is_leaking", False)
    trainer = sft(mesh, model, ring, folder, options)
    if ring is None:
        read(trainer.model, is_leaking=is_leaking)
    return trainer


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lfm2", "mamba2"])
def test_a_state_ends_with_a_packed_document(world, kind):
    expected, leaking = (
        train(None, packed, kind, None, {"is_leaking": each}) for each in (False, True)
    )
    # by which a leak would be seen
    assert differences(leaking, expected)["loss"] > 100 * TOLERANCE
    check(world, 2, packed, kind, {}, expected)
