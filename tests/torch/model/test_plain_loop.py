"""A loop of the user's own around ``parallelize``: whatever is called between its steps, it trains as one process."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.cases import long
from tests.torch.models import build, close_by_name, tokens, whole, whole_gradients

STEPS = 3


class Stop(Exception):
    """Raised in the middle of a forward pass."""


def fail(*_: Any) -> None:
    raise Stop


def evaluate(model: Any, batch: Any, how: str) -> None:
    match how:
        case "no_grad":
            with torch.no_grad():
                model(**batch)
        case "inference_mode":
            with torch.inference_mode():
                model(**batch)
        case "eval":
            with torch.no_grad():
                model.eval()(**batch)
            model.train()
        case "no backward":
            model(**batch)
        case "an exception":
            hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
            with pytest.raises(Stop):
                model(**batch)
            hook.remove()
        case "an exception in backward":
            hook = model.model.layers[0].mlp.register_full_backward_hook(fail)
            with pytest.raises(Stop):
                model(**batch).loss.backward()
            hook.remove()
            model.zero_grad()  # as a loop does that goes on


def losses(model: Any, batch: Any, how: str, when: str) -> list[float]:
    """The loss of each step of a loop, with an evaluation somewhere in it."""
    if when == "before the optimizer":
        evaluate(model, batch, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        if when == "before the step":
            evaluate(model, batch, how)
        loss = model(**batch).loss
        if when == "before backward":
            evaluate(model, batch, how)
        loss.backward()
        if when == "before the update":
            evaluate(model, batch, how)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def losses_on_ring(mesh: DeviceMesh, how: str, when: str) -> list[float]:
    model: Any = rs.parallelize(build("llama"), mesh)
    ids = tokens(1, 37)
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    match how:
        case "layers stay whole":
            model.set_reshard_after_backward(False)
        case "gathered by the user":
            model.unshard()
        case "gathered by the user after a pass":
            model(**batch)
            model.unshard()
    return losses(model, batch, how, when)


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("no_grad", "before the optimizer"),
        *long(
            ("no backward", "before the step"),
            ("an exception", "before backward"),
            ("inference_mode", "before the update"),
            ("eval", "before backward"),
        ),
        ("an exception in backward", "before the step"),
        ("layers stay whole", "never"),
        *long(("gathered by the user", "never")),
        ("gathered by the user after a pass", "never"),
    ],
)
def test_what_comes_between_steps_changes_nothing(pool, how, when):
    ids = tokens(1, 37)
    expected = losses(
        build("llama"), {"input_ids": ids, "labels": ids}, "nothing", "never"
    )
    for found in pool.run(losses_on_ring, 2, how, when):
        assert found == pytest.approx(expected, rel=1e-5)


def write_a_copy(mesh: DeviceMesh) -> None:
    model = rs.parallelize(build("llama").model, mesh)
    part = rs.shard_features({"inputs_embeds": torch.randn(1, 16, 64)}, mesh)
    for _ in range(2):
        model(**part)
        with torch.no_grad():
            model.norm.weight.mul_(2.0)


def test_a_weight_that_is_changed_while_it_is_a_copy_is_named(pool):
    for outcome in pool.outcomes(write_a_copy, 2):
        assert isinstance(
            outcome, rs.UnsupportedError
        ) and "norm.weight was changed between" in str(outcome)


def penalise(mesh: DeviceMesh | None) -> Any:
    """A penalty on weights that a ring gathers for the whole pass and for a layer, by their names, after the pass."""
    model: Any = (
        build("llama") if mesh is None else rs.parallelize(build("llama"), mesh)
    )
    batch = {"input_ids": (ids := tokens(1, 37)), "labels": ids}
    loss = model(**(batch if mesh is None else rs.shard_batch(batch, mesh))).loss
    loss = loss + 0.01 * sum(
        w.square().sum()
        for w in (model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight)
    )
    loss.backward()
    return whole(loss.detach()).item(), whole_gradients(model)


@pytest.mark.parametrize("replicate", [*long(1), 2])
def test_a_penalty_on_weights_counts_once(pool, replicate):
    loss, gradients = penalise(None)
    for found, own in pool.run(penalise, 2 * replicate, replicate=replicate):
        assert found == pytest.approx(loss, rel=1e-6) or replicate == 2
        close_by_name(own, gradients)


PARTS = ["model", "model.embed_tokens", "model.norm", "model.layers.1", "lm_head"]


def call_parts(mesh: DeviceMesh) -> list[str]:
    """What parts of a model say to calls of their own, before its first pass and before its backward pass."""
    model, ids, said = rs.parallelize(build("llama"), mesh), tokens(1, 16), []
    for _ in range(2):
        for name in PARTS:
            with pytest.raises(rs.UnsupportedError) as error:
                model.get_submodule(name)(ids)
            said.append(str(error.value))
        part = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
        with pytest.raises(
            rs.UnsupportedError,
            match=r"forward was called by itself: call model\(\*\*batch\)",
        ):
            model.forward(**part)
        with pytest.raises(
            rs.UnsupportedError,
            match="num_items_in_batch is 0, and the batch has 15 targets",
        ):
            model(**part, num_items_in_batch=0)
        model(**part)
    return said


def test_a_part_that_is_called_by_itself_names_the_remedy(pool):
    for said in pool.run(call_parts, 2):
        kinds = [
            "LlamaModel",
            "Embedding",
            "LlamaRMSNorm",
            "LlamaDecoderLayer",
            "Linear",
        ]
        assert [
            line.partition(" was called by itself")[0] for line in said
        ] == kinds * 2
        assert all(
            "from the logits of model(**batch)" in line and "full_tensor()" in line
            for line in said
        )


def load(
    mesh: DeviceMesh | None, kind: str, what: str, assign: bool
) -> dict[str, torch.Tensor]:
    """The weights after those of a file were loaded and a step was made."""
    model = build(kind)
    if mesh is not None:
        rs.parallelize(model, mesh)
    ids = tokens(1, 19)
    batch = {"input_ids": ids, "labels": ids}
    part = batch if mesh is None else rs.shard_batch(batch, mesh)
    model(**part)  # and no backward pass
    module = model.get_submodule(what)
    module.load_state_dict(
        build(kind, seed=7).get_submodule(what).state_dict(), assign=assign
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**part).loss.backward()
    optimizer.step()
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "what", "assign", "ranks", "tp"),
    [
        *long(("llama", "model.layers.1", True, 3, 1), ("llama-tied", "", True, 4, 2)),
        ("llama-tied", "", False, 3, 1),
    ],
)
def test_weights_of_a_file_are_loaded_as_on_one_process(
    pool, kind, what, assign, ranks, tp
):
    expected = load(None, kind, what, False)
    for weights in pool.run(load, ranks, kind, what, assign, tp=tp):
        close_by_name(weights, expected)


def test_weights_of_another_shape_are_named(pool):
    for outcome in pool.outcomes(load_another, 2):
        assert isinstance(
            outcome, RuntimeError
        ) and "size mismatch for lm_head.weight" in str(outcome)


def load_another(mesh: DeviceMesh) -> None:
    rs.parallelize(build("llama"), mesh).load_state_dict(
        build("llama", vocab_size=101).state_dict()
    )


def train_nothing(mesh: DeviceMesh, when: str, checkpoint: Any) -> None:
    model = build("llama")
    if when == "before":
        model.requires_grad_(False)
    rs.parallelize(model, mesh, checkpoint=checkpoint)
    if when == "after":
        model.requires_grad_(False)
    ids = tokens(1, 16)
    model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss.backward()


@pytest.mark.parametrize(
    ("when", "checkpoint"),
    [("before", "attention"), ("after", "none"), ("after", "full")],
)
def test_a_frozen_model_has_no_backward_pass(pool, when, checkpoint):
    for outcome in pool.outcomes(train_nothing, 2, when, checkpoint):
        assert isinstance(outcome, RuntimeError) and "does not require grad" in str(
            outcome
        )
