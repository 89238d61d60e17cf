"""What would not be exact on a ring raises on every rank, in one line that says what to do."""

import os
import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)
from trl import (  # pyright: ignore[reportPrivateImportUsage]
    BEMACallback,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    LogCompletionsCallback,
    SFTConfig,
)

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.hf import RingConfig
from ringspan.hf.batches import takes_whole_batches
from ringspan.hf.refusals import explained, refuse_arguments
from tests.cases import long
from tests.hf.rollouts import grpo, rloo
from tests.hf.test_classes import classify
from tests.hf.trainers import Examples, Ring, arguments, made, plain, sft
from tests.torch.models import config as config_of

GRPO = partial(GRPOConfig, num_generations=2)
SELECTIVE = {"gradient_checkpointing_kwargs": {"selective": True}}
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True}, "fp16=True is not supported on a ring; use bf16=True"),
    (
        {"fp16_full_eval": True},
        "fp16_full_eval=True is not supported on a ring; load the model in that dtype",
    ),
    (
        {"bf16_full_eval": True},
        "bf16_full_eval=True is not supported on a ring; load the model in that dtype",
    ),
    (
        {"label_smoothing_factor": 0.1},
        r"label_smoothing_factor=0.1 .* RingConfig\(label_smoothing=...\) for language",
    ),
    (
        {"neftune_noise_alpha": 5.0},
        "neftune_noise_alpha=5.0 is not supported on a ring",
    ),
    ({"auto_find_batch_size": True}, "auto_find_batch_size=True .* set the batch size"),
    ({"optim": "adafactor"}, "optim='adafactor' .* use one of adagrad, adamw_8bit"),
    ({"ddp_bucket_cap_mb": 3}, "ddp_bucket_cap_mb=3 .* not wrapped"),
    ({"ddp_broadcast_buffers": True}, "ddp_broadcast_buffers=True .* not wrapped"),
    ({"ddp_static_graph": True}, "ddp_static_graph=True .* not wrapped"),
    (
        {"fsdp": True, "fsdp_config": {"version": 2}},
        r"fsdp is not supported on a ring; .* sharded over the ring",
    ),
    ({"torch_compile": True}, r"torch_compile=True .* RingConfig\(compile=True\)"),
    (
        {"torch_compile_backend": "aot_eager"},
        r"torch_compile=True .* RingConfig\(compile=True\)",
    ),
    (
        {"torch_compile_mode": "default"},
        r"torch_compile=True .* RingConfig\(compile=True\)",
    ),
    (
        {"use_liger_kernel": True},
        "use_liger_kernel=True .* the ring's loss uses Liger's",
    ),
    ({"save_on_each_node": True}, "save_on_each_node=True .* rank 0 writes"),
    ({"eval_use_gather_object": True}, "eval_use_gather_object=True is not"),
    (
        {"accelerator_config": {"dispatch_batches": True}},
        "dispatch_batches=True .* each rank reads",
    ),
    (
        {"enable_jit_checkpoint": True},
        "enable_jit_checkpoint=True .* leave it out, and use save_steps",
    ),
    (
        {"train_sampling_strategy": "batch_rebalance"},
        "batch_rebalance.* use 'group_by_length'",
    ),
    (
        {"dataloader_in_order": False, "dataloader_num_workers": 2},
        "dataloader_in_order=False .* leave it True",
    ),
    (
        {"parallelism_config": ParallelismConfig(cp_size=2)},
        "parallelism_config, a second parallelism besides the ring",
    ),
    (
        {"average_tokens_across_devices": False},
        "average_tokens_across_devices=False with several replicas is not",
    ),
    (
        {"accelerator_config": {"even_batches": False}},
        "even_batches=False with several replicas is not supported",
    ),
]
OF_TRL: list[tuple[Any, dict[str, Any], str]] = [
    (
        SFTConfig,
        {"activation_offloading": True},
        r"activation_offloading=True .* RingConfig\(offload=",
    ),
    (SFTConfig, SELECTIVE, "'selective': True"),
    (
        DPOConfig,
        {"precompute_ref_log_probs": True},
        "precompute_ref_log_probs=True is not supported on a ring; leave",
    ),
    (
        KTOConfig,
        {"precompute_ref_log_probs": True},
        "precompute_ref_log_probs=True is not supported on a ring; leave",
    ),
    (
        GRPO,
        {"use_transformers_continuous_batching": True},
        "use_transformers_continuous_batching=True is not",
    ),
    (
        GRPO,
        {"use_transformers_paged": True},
        "use_transformers_continuous_batching=True is not",
    ),
    (
        GRPO,
        {"cache_implementation": "static"},
        "cache_implementation='static' is not supported on a ring",
    ),
    (
        GRPO,
        {"cast_lm_head_to_fp32": True},
        "cast_lm_head_to_fp32=True is not supported on a ring",
    ),
]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [*((TrainingArguments, *each) for each in OPTIONS), *OF_TRL],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_that_would_not_be_exact_raises(tmp_path, kind, options, message):
    with (
        mock.patch.dict(os.environ),
        pytest.raises(UnsupportedError, match=message) as raised,
    ):
        refuse_arguments(
            arguments(str(tmp_path), kind, **options), RingConfig(replicate=2)
        )
    assert "\n" not in str(raised.value)


def started(mesh: Any, make: Any, options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make(mesh, "llama", {}, folder, options).train()


def with_callback(
    mesh: Any, model: str, ring: dict[str, Any], folder: str, options: dict[str, Any]
) -> None:
    trainer = plain(mesh, model, ring, folder, options)
    trainer.add_callback(LogCompletionsCallback.__new__(LogCompletionsCallback))


def with_optimizer(
    mesh: Any, model: str, ring: dict[str, Any], folder: str, options: dict[str, Any]
) -> None:
    of, ring = made(model), {"ring": RingConfig(mesh=mesh)}
    Ring(
        model=of,
        args=arguments(folder),
        optimizers=(torch.optim.AdamW(of.parameters()), None),
        **ring,
    )


def on_three(
    mesh: Any, model: str, ring: dict[str, Any], folder: str, options: dict[str, Any]
) -> None:
    Ring(
        model=made(model),
        args=arguments(folder),
        train_dataset=Examples(4),
        ring=RingConfig(ring=3),
    )


def without_checkpoints(
    mesh: Any, model: str, ring: dict[str, Any], folder: str, options: dict[str, Any]
) -> Any:
    return plain(
        mesh, model, {"checkpoint": "none"}, folder, {"gradient_checkpointing": True}
    )


def launched_in_float16(
    mesh: Any, model: str, ring: dict[str, Any], folder: str, options: dict[str, Any]
) -> None:
    with mock.patch.dict(os.environ, {"ACCELERATE_MIXED_PRECISION": "fp16"}):
        plain(mesh, model, ring, folder, options)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (plain, {"fp16": True}, "fp16=True is not supported on a ring; use bf16=True"),
        (
            plain,
            {"callbacks": [BEMACallback()]},
            "BEMACallback is not supported on a ring; it copies whole weights",
        ),
        (plain, {"use_cpu": False}, "accelerate counts 1 of 2 processes"),
        (
            with_callback,
            {},
            "LogCompletionsCallback is not supported on a ring; it gathers from ranks",
        ),
        (with_optimizer, {}, "optimizer_cls_and_kwargs"),
        (
            on_three,
            {},
            "replicate 1 x ring 3 must equal the world size 2; rings that divide it: 1, 2",
        ),
        (without_checkpoints, {}, "contradicts RingConfig(checkpoint='none')"),
        (
            launched_in_float16,
            {},
            "mixed_precision='fp16', given or of the launch, is not exact on a ring; use 'bf16'",
        ),
        (
            grpo,
            {"num_generations": 4, "gradient_accumulation_steps": 1},
            "num_generations=4 does not divide the 2 completions that are made at once, per_device_train_batch_size 2 "
            "x replicas 1 x steps_per_generation 1; a ring is one process",
        ),
        (
            rloo,
            {"num_generations": 4, "eval_strategy": "steps"},
            "4 generations for each prompt of evaluation do not divide 2, per_device_eval_batch_size 2 x replicas 1",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value))[:40],
)
def test_what_would_not_be_exact_raises_on_every_rank(world, make, options, message):
    for error in world(2).outcomes(started, 2, make, options):
        assert isinstance(error, UnsupportedError | ConfigError), error
        assert message in str(error) and "\n" not in str(error)


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.sum()


def with_loss_options(mesh: Any, kind: str, ring: dict[str, Any]) -> Any:
    """What is logged of an evaluation, and of a step where it takes one."""
    if kind == "classifier":
        return classify(mesh, ring, False, "llama", {"max_steps": 1})
    make, own = (
        {"sft": sft, "grpo": grpo}.get(kind, plain),
        {"compute_loss_func": own_loss},
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(
            mesh,
            "llama",
            ring,
            folder,
            {"max_steps": 1} | (own if kind == "function" else {}),
        )
        trainer.evaluate()  # without either option
        trainer.train()
        return [one["loss"] for one in trainer.state.log_history if "loss" in one]


@pytest.mark.parametrize(
    ("kind", "ring"),
    [
        *long(("sft", {"label_smoothing": 0.3}), ("grpo", {"z_loss": 0.5})),
        ("classifier", {"label_smoothing": 0.3}),
        ("function", {"z_loss": 0.5}),
    ],
)
def test_additions_to_a_loss_that_is_not_the_rings_raise(world, kind, ring):
    name, value = next(iter(ring.items()))
    for error in world(2).outcomes(with_loss_options, 2, kind, ring):
        assert isinstance(error, UnsupportedError), error
        loss = (
            "a loss of next tokens"
            if kind == "classifier"
            else "the ring's own loss of next tokens"
        )
        assert str(error).startswith(
            f"{name}={value} is added to {loss}, "
        ) and "leave it out" in str(error)


@pytest.mark.long
def test_additions_to_the_rings_loss_are_taken(world):
    [without] = world(2).run(with_loss_options, 2, "ring", {})[0]
    for losses in world(2).run(with_loss_options, 2, "ring", {"z_loss": 0.5}):
        assert losses == [pytest.approx(losses[0])] and losses[0] > 1.1 * without


def different(mesh: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Examples(40, seed=mesh.get_rank())
        plain(mesh, "llama", {}, folder, {"train_dataset": data}).train()


def test_ranks_that_read_different_data_raise(world):
    for error in world(2).outcomes(different, 2):
        assert "the ranks of one ring were given different" in str(error)


def learn_from_padding(mesh: Any, labelled: str) -> None:
    """Of one replica alone: the others hear of it."""
    ids, mask = torch.arange(2, 13)[None], torch.ones(1, 11, dtype=torch.int64)
    is_padded = mesh["replicate"].get_local_rank() == 0
    mask[0, :3] -= int(is_padded)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids % 3}
    auto: Any = (
        AutoModelForTokenClassification
        if labelled == "tokens"
        else AutoModelForCausalLM
    )
    model = auto.from_config(
        config_of("llama", num_labels=3, classifier_dropout=0.0)
    ).float()
    takes_whole_batches(model, mesh, RingConfig(mesh=mesh))
    if labelled == "loss function" and is_padded:
        trainer: Any = SimpleNamespace(
            compute_loss_func=len, model=model, ring_mesh=mesh
        )
        Ring.compute_loss(trainer, model, batch)
    model(**batch)


@pytest.mark.parametrize("labelled", ["text", "tokens", "loss function"])
def test_labels_that_padding_would_predict_raise(world, labelled):
    place = int(labelled != "tokens")
    for error in world(2).outcomes(learn_from_padding, 2, labelled, replicate=2):
        assert isinstance(error, UnsupportedError)
        assert (
            f"labels[0, {place}] would be predicted from padding: attention_mask[0, 0] is 0"
            in str(error)
        )


def test_trainer_itself_is_as_before():
    assert "num_processes" not in vars(Trainer)
    from accelerate import Accelerator

    assert Accelerator().num_processes == 1


def test_a_loss_written_for_one_process_is_refused_with_advice():
    for failure, remedy in {
        "'NoneType' object is not subscriptable": r"labels = inputs\.pop\('labels'\)",
        "aten.mul.Tensor got mixed torch.Tensor and DTensor": r"\.full_tensor\(\)",
    }.items():
        with (
            pytest.raises(UnsupportedError, match=f"own_loss: .*{remedy}"),
            explained(own_loss),
        ):
            raise TypeError(failure)
        with pytest.raises(TypeError, match=failure), explained(Trainer.compute_loss):
            raise TypeError(failure)
