"""What would not be exact on a ring raises on every rank, in one line that says what to do."""

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Trainer
from trl import BEMACallback, LogCompletionsCallback  # pyright: ignore[reportPrivateImportUsage]

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.hf import RingConfig
from ringspan.hf.batches import takes_whole_batches
from ringspan.hf.refusals import explained
from tests.hf.preferences import dpo, kto
from tests.hf.rollouts import grpo, rloo
from tests.hf.test_classes import classify
from tests.hf.trainers import Examples, Ring, arguments, made, plain, sft
from tests.torch.models import config as config_of

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True}, "fp16=True is not supported on a ring; use bf16=True"),
    ({"fp16_full_eval": True}, "fp16_full_eval=True is not supported on a ring; load the model in that dtype"),
    ({"bf16_full_eval": True}, "bf16_full_eval=True is not supported on a ring; load the model in that dtype"),
    ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0.1 .* RingConfig\(label_smoothing=...\) for language"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 is not supported on a ring"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size=True .* set the batch size"),
    ({"optim": "adafactor"}, "optim='adafactor' .* use one of adagrad, adamw_torch"),
    ({"ddp_bucket_cap_mb": 3}, "ddp_bucket_cap_mb=3 .* not wrapped"),
    ({"ddp_broadcast_buffers": True}, "ddp_broadcast_buffers=True .* not wrapped"),
    ({"ddp_static_graph": True}, "ddp_static_graph=True .* not wrapped"),
    ({"fsdp": True, "fsdp_config": {"version": 2}}, r"fsdp is not supported on a ring; .* sharded over the ring"),
    ({"torch_compile": True}, r"torch_compile=True .* RingConfig\(compile=True\)"),
    ({"torch_compile_backend": "aot_eager"}, r"torch_compile=True .* RingConfig\(compile=True\)"),
    ({"torch_compile_mode": "default"}, r"torch_compile=True .* RingConfig\(compile=True\)"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True .* the ring's loss uses Liger's"),
    ({"save_on_each_node": True}, "save_on_each_node=True .* rank 0 writes"),
    ({"eval_use_gather_object": True}, "eval_use_gather_object=True is not"),
    ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True .* each rank reads"),
    ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint=True .* leave it out, and use save_steps"),
    ({"callbacks": [BEMACallback()]}, "BEMACallback is not supported on a ring; it copies whole weights"),
    ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance.* use 'group_by_length'"),
    ({"dataloader_in_order": False, "dataloader_num_workers": 2}, "dataloader_in_order=False .* leave it True"),
]


def refused(mesh: Any, options: dict[str, Any], ring: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain(mesh, "llama", ring, folder, options).train()


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[next(iter(options)) for options, _ in OPTIONS])
def test_an_argument_that_would_not_be_exact_raises(world, options, message):
    for error in world(2).outcomes(refused, 2, options, {}):
        assert isinstance(error, UnsupportedError), error
        with pytest.raises(UnsupportedError, match=message):
            raise error
        assert "\n" not in str(error)


def second(mesh: Any) -> None:
    config = ParallelismConfig(cp_size=2)
    refused(mesh, {"parallelism_config": config}, {})


def test_two_context_parallelisms_raise(world):
    for error in world(2).outcomes(second, 2):
        assert isinstance(error, UnsupportedError) and "parallelism_config, a second parallelism" in str(error)


def of_another_size(mesh: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Ring(model=made("llama"), args=arguments(folder), train_dataset=Examples(4), ring=RingConfig(ring=3))


def test_a_ring_that_does_not_divide_the_world_raises(world):
    for error in world(4).outcomes(of_another_size, 4):
        assert isinstance(error, ConfigError)
        assert str(error) == "replicate 1 x ring 3 must equal the world size 4; rings that divide it: 1, 2, 4"


def test_processes_that_accelerate_does_not_see_raise(world):
    """Each of them would write checkpoints as the first one."""
    for error in world(2).outcomes(refused, 2, {"use_cpu": False}, {}):
        assert isinstance(error, ConfigError) and "\n" not in str(error)
        assert "accelerate counts 1 of 2 processes" in str(error) and "TrainingArguments(use_cpu=True)" in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False with several replicas is not"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches=False with several replicas is not supported"),
    ],
    ids=["means of means", "uneven"],
)
def test_what_replicas_do_not_do_alike_raises(world, options, message):
    for error in world(2).run(caught, 2, options, replicate=2):
        assert message in error


def launched_with(mesh: Any, precision: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        return caught(mesh, {})


def logging_completions(mesh: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = plain(mesh, "llama", {}, folder, {})
        trainer.add_callback(LogCompletionsCallback.__new__(LogCompletionsCallback))


def test_a_callback_that_is_added_later_raises(world):
    for error in world(2).outcomes(logging_completions, 2):
        assert isinstance(error, UnsupportedError)
        assert str(error).startswith("LogCompletionsCallback is not supported on a ring; it gathers from ranks")


def test_a_precision_of_the_launcher_raises(world):
    for error in world(2).run(launched_with, 2, "fp16"):
        assert "mixed_precision='fp16', given or of the launch, is not exact on a ring; use 'bf16'" in error


def caught(mesh: Any, options: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedError) as error:
        refused(mesh, options, {})
    return str(error.value)


def with_optimizer(mesh: Any) -> None:
    model = made("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        Ring(model=model, args=arguments(folder), optimizers=(optimizer, None), ring=RingConfig(mesh=mesh))


def test_an_optimizer_of_the_whole_weights_raises(world):
    for error in world(2).outcomes(with_optimizer, 2):
        assert isinstance(error, ConfigError) and "optimizer_cls_and_kwargs" in str(error)


def offloading(mesh: Any, options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sft(mesh, "llama", {}, folder, options).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_offloading": True}, r"activation_offloading=True .* RingConfig\(offload="),
        ({"gradient_checkpointing_kwargs": {"selective": True}}, "'selective': True"),
    ],
)
def test_what_trl_would_put_around_layers_raises(world, options, message):
    for error in world(2).outcomes(offloading, 2, options):
        with pytest.raises(UnsupportedError, match=message):
            raise error


def preferring(mesh: Any, make: Any, options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make(mesh, "llama", {}, folder, options).train()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (dpo, {"precompute_ref_log_probs": True}, "precompute_ref_log_probs=True is not supported on a ring; leave"),
        (kto, {"precompute_ref_log_probs": True}, "precompute_ref_log_probs=True is not supported on a ring; leave"),
        (dpo, {"use_liger_kernel": True}, "use_liger_kernel=True is not supported on a ring; leave it out"),
        (grpo, {"use_vllm": True}, "use_vllm=True is not supported on a ring; leave it out: the model on the ring"),
        (grpo, {"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True is not"),
        (grpo, {"use_transformers_paged": True}, "use_transformers_continuous_batching=True is not"),
        (
            grpo,
            {"cache_implementation": "static"},
            "cache_implementation='static' is not supported on a ring; leave it",
        ),
        (grpo, {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True is not supported on a ring"),
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
def test_what_trainers_of_preferences_and_completions_do_not_do_raises(world, make, options, message):
    for error in world(2).outcomes(preferring, 2, make, options):
        assert isinstance(error, UnsupportedError | ConfigError), error
        assert message in str(error) and "\n" not in str(error)


def test_checkpointing_and_none_contradict(world):
    for error in world(2).outcomes(refused, 2, {"gradient_checkpointing": True}, {"checkpoint": "none"}):
        assert "contradicts RingConfig(checkpoint='none')" in str(error)


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.sum()


def with_loss_options(mesh: Any, kind: str, ring: dict[str, Any]) -> Any:
    """What is logged of an evaluation, and of a step where it takes one."""
    if kind == "classifier":
        return classify(mesh, ring, False, "llama", {"max_steps": 1})
    make, own = {"sft": sft, "grpo": grpo}.get(kind, plain), {"compute_loss_func": own_loss}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(mesh, "llama", ring, folder, {"max_steps": 1} | (own if kind == "function" else {}))
        trainer.evaluate()  # without either option
        trainer.train()
        return [one["loss"] for one in trainer.state.log_history if "loss" in one]


@pytest.mark.parametrize("kind", ["sft", "grpo", "classifier", "function"])
@pytest.mark.parametrize("ring", [{"label_smoothing": 0.3}, {"z_loss": 0.5}], ids=["smoothing", "z"])
def test_additions_to_a_loss_that_is_not_the_rings_raise(world, kind, ring):
    name, value = next(iter(ring.items()))
    for error in world(2).outcomes(with_loss_options, 2, kind, ring):
        assert isinstance(error, UnsupportedError), error
        loss = "a loss of next tokens" if kind == "classifier" else "the ring's own loss of next tokens"
        assert str(error).startswith(f"{name}={value} is added to {loss}, ") and "leave it out" in str(error)


def test_additions_to_the_rings_loss_are_taken(world):
    [without] = world(2).run(with_loss_options, 2, "ring", {})[0]
    for losses in world(2).run(with_loss_options, 2, "ring", {"z_loss": 0.5}):
        assert losses == [pytest.approx(losses[0])] and losses[0] > 1.1 * without


def different(mesh: Any) -> None:
    """Each rank reads data of its own."""
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
    auto: Any = AutoModelForTokenClassification if labelled == "tokens" else AutoModelForCausalLM
    model = auto.from_config(config_of("llama", num_labels=3, classifier_dropout=0.0)).float()
    takes_whole_batches(model, mesh, RingConfig(mesh=mesh).step)
    if labelled == "loss function" and is_padded:
        trainer: Any = SimpleNamespace(compute_loss_func=len, model=model, ring_mesh=mesh)
        Ring.compute_loss(trainer, model, batch)
    model(**batch)


@pytest.mark.parametrize("labelled", ["text", "tokens", "loss function"])
def test_labels_that_padding_would_predict_raise(world, labelled):
    place = int(labelled != "tokens")
    for error in world(2).outcomes(learn_from_padding, 2, labelled, replicate=2):
        assert isinstance(error, UnsupportedError)
        assert f"labels[0, {place}] would be predicted from padding: attention_mask[0, 0] is 0" in str(error)


def test_trainer_itself_is_as_before():
    assert "num_processes" not in vars(Trainer)
    from accelerate import Accelerator

    assert Accelerator().num_processes == 1


def test_a_loss_that_was_written_for_one_process_is_told_what_to_change():
    for failure, remedy in {
        "'NoneType' object is not subscriptable": r"labels = inputs\.pop\('labels'\)",
        "aten.mul.Tensor got mixed torch.Tensor and DTensor": r"\.full_tensor\(\)",
    }.items():
        with pytest.raises(UnsupportedError, match=f"own_loss: .*{remedy}"), explained(own_loss):
            raise TypeError(failure)
        with pytest.raises(TypeError, match=failure), explained(Trainer.compute_loss):
            raise TypeError(failure)
