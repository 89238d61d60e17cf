"""A pass that ends in an exception: which gradients stay, and which exception is raised."""

from unittest.mock import patch

import pytest
import torch

import ringspan as rs
from ringspan.proof.float64 import in_float64_of
from tests.cases import long
from tests.torch.models import build, close_by_name, logged, tokens, whole_gradients


class Odd(Exception):
    pass


def loss_of(model, mesh, ids):
    if mesh is None:  # where transformers would compute the loss in float32
        return torch.nn.functional.cross_entropy(
            model(input_ids=ids).logits[0, :-1], ids[0, 1:]
        )
    return model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss


class Once(torch.autograd.Function):
    """Hand values on, and raise in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        raise Odd("in backward")


def fails(model, mesh, ids, where):
    """Run a micro-batch whose last layer raises; return the exception."""
    layer = model.model.layers[-1]

    def strike(module, args, output):
        if where == "forward":
            raise Odd("in forward")
        return (
            (Once.apply(output[0]), *output[1:])
            if isinstance(output, tuple)
            else Once.apply(output)
        )

    hook = layer.register_forward_hook(strike)
    try:
        loss_of(model, mesh, ids).backward()
    except Odd as error:
        return error
    finally:
        hook.remove()
    raise AssertionError("nothing was raised")


def three_micro_batches(model, mesh, where):
    """Gradients of the first and third of three micro-batches, of which the second raises."""
    loss_of(model, mesh, tokens(1, 37)).backward()
    fails(model, mesh, tokens(1, 29, seed=2), where)
    loss_of(model, mesh, tokens(1, 33, seed=3)).backward()
    return whole_gradients(model)


def on_ring(mesh, where, checkpoint):
    return three_micro_batches(
        rs.parallelize(in_float64_of(build("llama")), mesh, checkpoint=checkpoint),
        mesh,
        where,
    )


@pytest.mark.parametrize("checkpoint", [*long("none"), "full"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_loop_can_leave_out_a_micro_batch_that_raises(pool, where, checkpoint):
    alone = in_float64_of(build("llama"))
    for seed, length in ((1, 37), (3, 33)):
        loss_of(alone, None, tokens(1, length, seed=seed)).backward()
    expected = whole_gradients(alone)
    if where == "backward":
        # The head and the last norm had their gradients of the second micro-batch when its layer raised, as on one
        # process; the layers before have none of it.
        expected = {
            name: x
            for name, x in expected.items()
            if name.startswith(("model.layers", "model.embed"))
        }
    for found in pool.run(on_ring, 2, where, checkpoint):
        close_by_name({name: found[name] for name in expected}, expected, 1e-12)


def without_sums(mesh, where):
    """Accumulate without sums over ranks, fail, and run a whole step; what was said, and the step's gradients."""
    model = rs.parallelize(in_float64_of(build("llama")), mesh)
    model.set_requires_gradient_sync(False)
    loss_of(model, mesh, tokens(1, 37)).backward()
    with logged() as lines:
        fails(model, mesh, tokens(1, 29, seed=2), where)
        model.set_requires_gradient_sync(True)
        loss_of(model, mesh, tokens(1, 33, seed=3)).backward()
    return lines, whole_gradients(model)


@pytest.mark.parametrize("where", [*long("forward"), "backward"])
def test_unsummed_gradients_are_dropped_with_a_warning(pool, where):
    alone = in_float64_of(build("llama"))
    loss_of(alone, None, tokens(1, 33, seed=3)).backward()
    for lines, gradients in pool.run(without_sums, 2, where):
        assert (
            len(lines) == 1
            and "begin the step again with its first micro-batch" in lines[0]
        )
        close_by_name(gradients, whole_gradients(alone), 1e-12)


def summed_over_the_ring_alone(mesh):
    """The same with gradients that are summed over the ring, and not over replicas yet."""
    model = rs.parallelize(in_float64_of(build("llama")), mesh)
    model.set_requires_all_reduce(False)
    loss_of(model, mesh, tokens(1, 37)).backward()
    with logged() as lines:
        fails(model, mesh, tokens(1, 29, seed=2), "forward")
        model.set_requires_all_reduce(True)
        loss_of(model, mesh, tokens(1, 33, seed=3)).backward()
    return lines, whole_gradients(model)


def test_gradients_that_wait_for_replicas_are_dropped_too(pool):
    alone = in_float64_of(build("llama"))
    loss_of(alone, None, tokens(1, 33, seed=3)).backward()
    for lines, gradients in pool.run(summed_over_the_ring_alone, 4, replicate=2):
        assert len(lines) == 1 and "first micro-batch" in lines[0]
        close_by_name(gradients, whole_gradients(alone), 1e-12)


def failing_twice(mesh, where):
    model = rs.parallelize(build("llama"), mesh)
    with patch(
        "ringspan.torch.model.memory.sharding.recover",
        side_effect=AttributeError("a name that a release dropped"),
    ):
        error = fails(model, mesh, tokens(1, 29), where)
    return repr(error), error.__notes__


def test_the_exception_of_a_pass_is_never_replaced(pool):
    for error, notes in pool.run(failing_twice, 2, "forward"):
        assert error == "Odd('in forward')"
        assert len(notes) == 1 and "a name that a release dropped" in notes[0]
