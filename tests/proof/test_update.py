"""Proofs of optimizer steps: micro-batches before a step, and a limit of the gradient's norm."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from ringspan.core.errors import ConfigError
from ringspan.proof import steps
from ringspan.proof.batches import batches
from ringspan.proof.options import options_of_trial
from ringspan.proof.run import Proof, prove
from ringspan.torch.model.layers.modules import local_part
from tests.cases import long

ACCUMULATED = {"accumulation_steps": 2, "clip_grad_norm": 1.0}


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """Put one wrong line into an optimizer step on the ring."""

    def local_norm(parameters: Any) -> torch.Tensor:
        squares = [local_part(p.grad).square().sum() for p in parameters]
        return torch.stack(squares).sum().sqrt()

    def by_own_counts(model: Any, parts: Any, _: int, __: int) -> Iterator[Any]:
        for part in parts:
            output = model(**part)
            (output.loss / len(parts)).backward()
            output.loss = output.loss / len(parts)
            yield output

    def unclipped(*_: Any) -> None:
        """Leave gradients as they are, though their norm is right."""

    def without_the_first(model: Any, parts: Any, num: int, count: int) -> Any:
        for number, output in enumerate(plain(model, parts, num, count)):
            if number == 0:
                model.zero_grad()
            yield output

    plain = steps.accumulate
    faults = {
        "local norm": ("gradient_norm", local_norm),
        "own counts": ("accumulate", by_own_counts),
        "unclipped": ("clip_gradients", unclipped),
        "without the first": ("accumulate", without_the_first),
    }
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(steps, *faults[fault])
        yield


def proven(
    mesh: Any, kind: str, options: dict[str, Any], fault: str = "", dtype: Any = None
) -> Proof:
    with broken(fault):
        return prove(CONFIG_MAPPING[kind](), mesh, dtype=dtype, **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"tree": True, "checkpoint": "full", "folds": 1}),
        *long(("qwen3_moe", {"folds": 2}), ("gemma3_text", {"layout": "striped"})),
    ],
)
def test_micro_batches_and_a_limit_are_exact(pool, kind, options):
    for proof in pool.run(proven, 2, kind, ACCUMULATED | options):
        assert proof.is_exact, proof.as_json()
        assert max(row.error for row in proof.rows if row.error is not None) < 1e-12
        assert proof.options["accumulation_steps"] == 2
        assert proof.options["clip_grad_norm"] == 0.1


@pytest.mark.long
def test_replicas_divide_by_the_targets_of_all(pool):
    for proof in pool.run(proven, 2, "llama", ACCUMULATED, replicate=2):
        assert proof.is_exact, proof.as_json()


def test_mixtures_go_the_routes_of_each_micro_batch(pool):
    for proof in pool.run(proven, 2, "qwen3_moe", ACCUMULATED, "", torch.bfloat16):
        assert proof.is_exact, proof.as_json()


@pytest.mark.parametrize(
    ("fault", "of", "option"),
    [
        ("local norm", "", "clip_grad_norm"),
        ("own counts", "the gradient of", "accumulation_steps"),
        *long(
            ("unclipped", "", "clip_grad_norm"),
            ("without the first", "the gradient of", "accumulation_steps"),
        ),
    ],
)
def test_a_fault_of_an_optimizer_step_is_found(pool, fault, of, option):
    for proof in pool.run(proven, 2, "llama", ACCUMULATED, fault):
        wrong = next(row for row in proof.rows if not row.is_exact)
        assert (wrong.place or wrong.of).startswith(of), wrong
        assert proof.smallest is not None and [*proof.smallest] == [option]


def test_micro_batches_differ_in_tokens_and_targets():
    for label, batch in batches(2, vocabulary=97, tree=True).items():
        other = batch.micro(1)
        assert not torch.equal(other.inputs["input_ids"], batch.inputs["input_ids"])
        counts = [(each.inputs["labels"] != -100).sum() for each in (batch, other)]
        assert counts[0] > counts[1] > 0, label
        where = other.inputs["labels"] != -100
        assert torch.equal(
            other.inputs["labels"][where], other.inputs["input_ids"][where]
        )


@pytest.mark.parametrize(
    "given",
    [{"accumulation_steps": 0}, {"accumulation_steps": 1.5}, {"clip_grad_norm": -1}],
)
def test_values_of_a_step_that_make_no_sense_are_refused(given):
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        options_of_trial(given)


def test_an_optimizer_step_is_small_in_a_trial():
    given = {"accumulation_steps": 8, "clip_grad_norm": 0.05}
    assert options_of_trial(given) == (
        {"accumulation_steps": 2, "clip_grad_norm": 0.05},
        [],
    )
    assert options_of_trial({"accumulation_steps": 1, "clip_grad_norm": 0}) == ({}, [])
