"""transformers' Trainer on a ring is the one on one process: ten steps, evaluation, and the weights at the end."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, Trainer

import ringspan as rs
from ringspan.core.errors import CheckpointError
from ringspan.hf import RingConfig, RingTrainerMixin, seams
from ringspan.hf.batches import takes_whole_batches, whole_logits
from ringspan.hf.progress import load_optimizer, save_optimizer
from tests.cases import long
from tests.hf.trainers import (
    TOLERANCE,
    Examples,
    arguments,
    check,
    differences,
    made,
    plain,
    saved,
    train,
)
from tests.torch.models import build

RINGS = [(4, 2), *long((3, 1))]  # ranks, replicas


@pytest.mark.parametrize(("ranks", "replicas"), RINGS)
def test_ten_steps_equal_one_process(world, ranks, replicas):
    sizes = dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size"), 2 * replicas
    )
    expected = train(None, plain, "llama", None, sizes)
    assert (
        len(expected["loss"]) == len(expected["grad_norm"]) == 10
        and len(expected["eval_loss"]) == 1
    )
    check(world, ranks, plain, "llama", {}, expected, replicate=replicas)


@pytest.mark.long
def test_steps_in_folds_are_those_of_one_pass(world):
    check(
        world,
        2,
        plain,
        "llama",
        {"max_steps": 3},
        train(None, plain, "llama", None, {"max_steps": 3}),
        {"folds": 3},
    )


class Penalised:
    """A penalty on all weights, as people write it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        kwargs["return_outputs"] = True
        loss, outputs = super().compute_loss(model, inputs, **kwargs)
        loss = loss + 0.01 * sum(weight.square().sum() for weight in model.parameters())
        return (loss, outputs) if return_outputs else loss


def penalised(*given: Any) -> Any:
    trainer = plain(*given)
    trainer.__class__ = type("Penalised", (Penalised, type(trainer)), {})
    return trainer


@pytest.mark.long
def test_a_penalty_on_weights_counts_as_on_one_process(world):
    sizes = dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size"), 4
    )
    expected = train(None, penalised, "llama", None, {"max_steps": 2} | sizes)
    check(world, 4, penalised, "llama", {"max_steps": 2}, expected, replicate=2)


@pytest.mark.parametrize(
    "options",
    [
        {
            "optim": "sgd",
            "learning_rate": 1.0,
            "gradient_checkpointing": True,
            "average_tokens_across_devices": False,
        },
        *long(
            {"optim": "rmsprop", "learning_rate": 1e-3},
            {"optim": "adagrad", "learning_rate": 1e-3},
            {"dataloader_drop_last": True, "per_device_train_batch_size": 3},
            {"include_num_input_tokens_seen": "all", "max_grad_norm": 0.0},
        ),
    ],
    ids=lambda options: next(iter(options)) + "=" + str(next(iter(options.values()))),
)
def test_what_is_asked_for_keeps_its_meaning(world, options):
    options = {"max_steps": 3} | options
    expected = train(None, plain, "llama", None, options)
    for found in world(2).run(train, 2, plain, "llama", {}, options):
        # whose first steps are signs of gradients, of rounding too
        apart = differences(found, expected)
        if options.get("optim") in (
            "rmsprop",
            "adagrad",
        ):
            apart = {name: apart[name] for name in ("loss", "eval_loss")}
        assert max(apart.values()) < TOLERANCE


class Stream(IterableDataset[Any]):
    """Examples without a length."""

    def __iter__(self) -> Any:
        examples = Examples(40)
        return (examples[index] for index in range(40))


@pytest.mark.long
def test_a_stream_is_dealt_to_replicas(world):
    options = {"max_steps": 3, "train_dataset": Stream()}
    expected = train(
        None, plain, "llama", None, options | {"per_device_train_batch_size": 4}
    )
    for found in world(4).run(train, 4, plain, "llama", {}, options, replicate=2):
        assert differences(found, expected)["loss"] < TOLERANCE


@pytest.mark.long
def test_bfloat16_is_that_of_one_process(world):
    options = {"bf16": True, "max_steps": 3}
    expected = train(None, plain, "llama", None, options)
    exact = train(None, plain, "llama", None, {"max_steps": 3})
    assert expected["loss"] != exact["loss"]
    for found in world(2).run(train, 2, plain, "llama", {}, options):
        assert found["loss"] != exact["loss"]
        assert differences(found, expected)["loss"] < 3e-3


def metrics(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    places = np.arange(logits[0].size).reshape(logits.shape[1:])
    return {
        "sum": float((logits * np.cos(places)).mean()),
        "labels": float((labels * (labels >= 0)).sum()),
    }


def doubled(logits: Any, labels: Any) -> Any:
    return 2 * logits


def predict(mesh: Any, ring: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    own = {"compute_metrics": metrics, "preprocess_logits_for_metrics": doubled}
    with tempfile.TemporaryDirectory() as folder:
        trainer = plain(mesh, "llama", ring, folder, options | own)
        evaluated = trainer.evaluate()
        predicted = trainer.predict(Examples(11, length=19, seed=2))
        only_loss = trainer.evaluate(
            Examples(11, length=19, seed=2), metric_key_prefix="other"
        )
        names = ("eval_loss", "eval_sum", "eval_labels")
        values = {name: evaluated[name] for name in names} | {
            "other_loss": only_loss["other_loss"]
        }
        return (
            values,
            predicted.predictions,
            predicted.label_ids,
            predicted.metrics["test_loss"],
        )


@pytest.mark.parametrize(("ranks", "replicas"), RINGS)
def test_predictions_are_whole_and_in_order(world, ranks, replicas):
    size = {"per_device_eval_batch_size": 2 * replicas}
    values, logits, labels, loss = predict(None, None, size)
    assert logits.shape == (11, 19, 97)
    for found in world(ranks).run(predict, ranks, {}, {}, replicate=replicas):
        assert found[0] == pytest.approx(values, rel=TOLERANCE)
        np.testing.assert_allclose(found[1], logits, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found[2], labels)
        assert found[3] == pytest.approx(loss, rel=TOLERANCE)


class Holes(Examples):
    """Of which the third and the fourth have no target."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        example = super().__getitem__(index)
        return example | (
            {"labels": torch.full_like(example["labels"], -100)}
            if index in (2, 3)
            else {}
        )


def evaluate_holes(mesh: Any, ring: dict[str, Any] | None, size: int) -> list[float]:
    """Losses without and with logits, of all batches and of those that have one."""
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        given = {"eval_dataset": Holes(5, seed=1), "per_device_eval_batch_size": size}
        trainer = plain(mesh, "llama", ring, folder, given)
        for trainer.compute_metrics in (None, metrics):
            for trainer.args.logging_nan_inf_filter in (True, False):
                losses.append(trainer.evaluate()["eval_loss"])
    return losses


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "replicas"), RINGS)
def test_a_batch_without_targets_has_no_part_in_an_evaluation(world, ranks, replicas):
    expected = evaluate_holes(None, None, 2)
    # transformers 5.17 skips none.
    assert np.isfinite(expected).tolist() in ([True, False] * 2, [False, False] * 2)
    for found in world(ranks).run(
        evaluate_holes, ranks, {}, 2 // replicas, replicate=replicas
    ):
        assert found == pytest.approx(expected, rel=TOLERANCE, nan_ok=True)


def loss_beside_logits(mesh: Any) -> tuple[float, float]:
    """The loss of a batch with few targets, of whose number the model is not told, on one process and on a ring."""
    model, ids = build("llama").eval(), torch.arange(2, 25)[None]
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids > 5, -100)}
    with torch.no_grad():
        alone = float(model(**batch).loss)
        takes_whole_batches(model, mesh, RingConfig(mesh=mesh))
        with whole_logits(model, wanted=True):
            return alone, float(model(**batch).loss)


def test_the_loss_beside_logits_counts_the_targets_of_all_ranks(world):
    for alone, found in world(4).run(loss_beside_logits, 4):
        assert found == pytest.approx(alone, rel=TOLERANCE)


def checkpointed(
    mesh: Any, folder: str, options: dict[str, Any], resume: str | None
) -> Any:
    """The losses of a run that saves, and what the model's folder opens as."""
    trainer = plain(
        mesh,
        "llama",
        {},
        folder,
        {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "seed": 7}
        | options,
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = {
        one["step"]: one["loss"] for one in trainer.state.log_history if "loss" in one
    }
    trainer.save_model(folder + "/model")
    weights = {}
    if trainer.args.should_save:
        weights = AutoModelForCausalLM.from_pretrained(folder + "/model").state_dict()
    return (
        losses,
        {name: tensor.clone() for name, tensor in weights.items()},
        trainer.state.best_model_checkpoint,
    )


def test_a_run_resumes_on_another_ring(world, tmp_path):
    through, weights, _ = world(2).run(checkpointed, 2, str(tmp_path), {}, None)[0]
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    names = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "training_args.bin",
        "trainer_state.json",
        "scheduler.pt",
    } <= names
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").num_parameters()
        > 0
    )
    options, resume = {"per_device_train_batch_size": 1}, str(tmp_path / "checkpoint-2")
    results = world(4).run(
        checkpointed, 4, str(tmp_path / "on 4"), options, resume, replicate=2
    )
    for losses, _, _ in results:
        after = {step: loss for step, loss in losses.items() if step > 2}
        assert after == pytest.approx(
            {step: through[step] for step in (3, 4)}, rel=1e-6
        )
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


def of_another_config(mesh: Any, folder: str) -> Any:
    """The optimizer's state of one model, given to one whose config has another value."""
    for eps in (1e-6, 1e-3):
        model: Any = rs.parallelize(build("llama", rms_norm_eps=eps), mesh)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        if eps == 1e-6:
            save_optimizer(Path(folder), model, optimizer, 1)
        load_optimizer(Path(folder), model, optimizer)


def test_a_run_resumes_with_the_config_that_it_began_with(world, tmp_path):
    for outcome in world(2).outcomes(of_another_config, 2, str(tmp_path)):
        with pytest.raises(
            CheckpointError, match="with rms_norm_eps = 1e-06 in the model's"
        ):
            raise outcome


class Noting(Trainer):
    """Notes which of Trainer's private methods were called, each of which it overrides."""

    noted: set[str]


def _noting(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.noted |= {name}
        return getattr(super(Noting, self), name)(*args, **kwargs)

    return method


for _name in seams.OVERRIDDEN["transformers:Trainer"]:
    setattr(Noting, _name, _noting(_name))


class RingNoting(RingTrainerMixin, Noting):
    """On a ring."""


def noted(mesh: Any, folder: str) -> tuple[set[str], list[float], list[float]]:
    """What of a user's own is called in a run that saves and in one that resumes, and the losses of both."""
    often = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    often |= {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "max_steps": 2,
    }
    data, called, losses = Examples(8), set(), []
    for resume in (None, f"{folder}/checkpoint-1"):
        torch.manual_seed(0)
        given = {
            "model": made("llama"),
            "args": arguments(folder, **often),
            "train_dataset": data,
        }
        trainer = RingNoting(**given, eval_dataset=data, ring=RingConfig(mesh=mesh))
        trainer.noted = set()
        trainer.train(resume_from_checkpoint=resume)
        called |= trainer.noted
        losses.append(
            [one["loss"] for one in trainer.state.log_history if "loss" in one]
        )
    return called, *losses


@pytest.mark.long
def test_a_trainers_own_saving_and_loading_runs_before_the_rings(world, tmp_path):
    for rank, (called, through, resumed) in enumerate(
        world(2).run(noted, 2, str(tmp_path))
    ):
        # transformers 5.17 calls it where it writes alone
        elsewhere = {"_save"} if rank else set()
        # which comes only with a hub
        ours = {*seams.OVERRIDDEN["transformers:Trainer"]} - {"_push_from_checkpoint"}
        assert called | elsewhere == ours
        assert resumed == pytest.approx(through, rel=1e-6)


@pytest.mark.long
def test_the_best_model_is_loaded_at_the_end(world, tmp_path):
    options = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "max_steps": 4,
        "learning_rate": 0.3,  # the second evaluation is worse
        "save_total_limit": 1,
    }
    _, weights, best = world(2).run(checkpointed, 2, str(tmp_path), options, None)[0]
    assert best is not None
    for name, value in AutoModelForCausalLM.from_pretrained(best).state_dict().items():
        assert torch.equal(weights[name], value)


def counted(mesh: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer = plain(mesh, "llama", {}, folder, {"max_steps": 1})
        trainer.train()
        return trainer.state.total_flos, trainer.get_total_train_batch_size(
            trainer.args
        )


@pytest.mark.long
def test_counts_are_per_replica(world):
    flos = 6 * 23 * 2 * 2 * made("llama").num_parameters(exclude_embeddings=True)
    assert world(2).run(counted, 2) == [(flos, 4)] * 2
    assert [total for _, total in world(4).run(counted, 4, replicate=2)] == [8] * 4
