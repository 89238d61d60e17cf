"""What changes between a pass and its backward pass leaves recomputations as the pass was."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

import ringspan as rs
from ringspan.proof.float64 import in_float64_of
from ringspan.torch.model.consistency import fixed
from tests.cases import long
from tests.torch.models import build, close_by_name, relative, tokens, whole_gradients

TARGETS = ["q_proj", "down_proj", "lm_head"]


def adapted(dropout: float) -> Any:
    """A model with two adapters, of the head too, which is called again in backward."""
    torch.manual_seed(0)
    model: Any = in_float64_of(build("llama"))
    targets = TARGETS[: 2 if dropout else 3]
    config = LoraConfig(
        r=4, lora_dropout=dropout, task_type="CAUSAL_LM", target_modules=targets
    )
    model = get_peft_model(model, config, "first")
    model.add_adapter("second", config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double().train()


def train_both(model: Any) -> None:
    """Let both adapters train; PEFT freezes those that are not active."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_()


def scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["first"] *= 3


def freeze(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad_(requires_grad=False)


def switch(model: Any) -> None:
    model.set_adapter("second")
    train_both(model)


# What is done to a model between a pass and its backward pass; a context is active in backward.
CHANGES: dict[str, Callable[[Any], AbstractContextManager[Any] | None]] = {
    "another adapter": switch,
    "another adapter, the first frozen": lambda model: model.set_adapter("second"),
    "no adapter": lambda model: model.disable_adapter(),
    "another scale": scale,
    "evaluation": lambda model: model.eval() and None,
    "fewer trained": freeze,
    "more trained": train_both,
}
OPTIONS: list[dict[str, Any]] = [
    {"checkpoint": "attention"},
    *long(
        {"checkpoint": "full", "layers_per_checkpoint": 2},
        {"folds": 2},
        {"checkpoint": "none"},
        {"checkpoint": "full"},
        {"layers_per_checkpoint": 2},
        {"folds": 2, "checkpoint": "full"},
    ),
]


def loss_of(
    model: Any, mesh: DeviceMesh | None, ids: Tensor, options: dict[str, Any]
) -> Tensor:
    if mesh is None:  # transformers' own would be rounded to float32
        return cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
    return model(
        **rs.shard_batch(
            {"input_ids": ids, "labels": ids}, mesh, folds=options.get("folds", 1)
        )
    ).loss


def changed(
    mesh: DeviceMesh | None,
    names: list[str],
    options: dict[str, Any],
    dropout: float = 0.0,
) -> list[Any]:
    """Losses, and gradients by name, of a pass with each change behind it and of another pass that follows."""
    found: list[Any] = []
    for name in names:
        model, ids = adapted(dropout), tokens(1, 24)
        if mesh is not None:
            rs.parallelize(model, mesh, **options)
        torch.manual_seed(5)
        loss = loss_of(model, mesh, ids, options)
        context = CHANGES[name](model) if name else None
        with context or nullcontext():
            loss.backward()
        other = None
        if name == "another adapter":  # which has its own pass, as its switches are
            other = loss_of(model, mesh, ids, options)
            other.backward()
            other = other.detach()
        found.append((loss.detach(), other, whole_gradients(model)))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_recomputation_takes_the_switches_of_its_pass(pool, options):
    names = [*CHANGES]
    expected = changed(None, names, {})
    for results in pool.run(changed, 2, names, options):
        for (loss, other, gradients), (one, of_other, wanted) in zip(
            results, expected, strict=True
        ):
            assert relative(loss, one) < 1e-9
            assert other is None or relative(other, of_other) < 1e-9
            close_by_name(gradients, wanted, 1e-9)


def test_dropout_is_drawn_again_although_evaluation_began(pool):
    for options in (
        {"checkpoint": "attention"},
        {"checkpoint": "full", "layers_per_checkpoint": 2},
        {"folds": 2},
    ):
        for (_, _, plain), (_, _, found) in pool.run(
            changed, 2, ["", "evaluation"], options, 0.2
        ):
            close_by_name(found, plain, 1e-9)


def stepped(mesh: DeviceMesh, options: dict[str, Any]) -> Any:
    """Gradients of a step after one whose weights were changed in between, and of one alone."""
    model, ids = adapted(0.0), tokens(1, 24)
    rs.parallelize(model, mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    found: list[Any] = []
    for is_changed in (False, True, False):
        loss = loss_of(model, mesh, ids, options)
        if is_changed:
            optimizer.step()  # of the gradients of before
            with pytest.raises(
                rs.UnsupportedError,
                match=r"lora_A.first.weight was changed between a forward pass and",
            ):
                loss.backward()
        else:
            loss.backward()
            found.append(
                {
                    name: None if x is None else x.clone()
                    for name, x in whole_gradients(model).items()
                }
            )
        if is_changed:
            model.zero_grad()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "none"},
        {"layers_per_checkpoint": 2},
        *long({"checkpoint": "full"}),
    ],
)
def test_weights_changed_before_backward_are_refused(pool, options):
    for first, last in pool.run(stepped, 2, options):
        close_by_name(last, first, 1e-12)


def learning_in_evaluation(
    mesh: DeviceMesh, options: dict[str, Any], is_evaluated: bool
) -> list[str]:
    """What is logged in two backward passes, behind an evaluation."""
    said: list[str] = []
    log = logging.getLogger(fixed.__name__)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log, "warning", lambda line, *args: said.append(line % args))
        model, ids = rs.parallelize(build("llama"), mesh, **options), tokens(1, 16)
        with torch.no_grad():
            loss_of(model.eval(), mesh, ids, options)
        assert not said
        for _ in range(2):
            loss_of(model.train(not is_evaluated), mesh, ids, options).backward()
    return said


def test_learning_in_evaluation_mode_says_what_it_leaves_out(pool):
    options = {"z_loss": 0.01, "layers_per_checkpoint": 2}
    first, second = pool.run(learning_in_evaluation, 2, options, True)
    assert not second and len(first) == 1
    assert (
        "z_loss=0.01, layers_per_checkpoint=2, checkpoint='attention' applies to training mode only; call"
        in first[0]
    )
    assert pool.run(learning_in_evaluation, 2, options, False) == [[], []]
    assert pool.run(learning_in_evaluation, 2, {"checkpoint": "none"}, True) == [[], []]
