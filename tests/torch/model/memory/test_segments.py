"""Layers that share one kept input: the same gradients, fewer inputs."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import ringspan as rs
from ringspan.core.schedule.choice import frugal_segment, num_inputs
from ringspan.torch.engine.attention.handler import handled
from ringspan.torch.model.memory import segments
from ringspan.torch.model.memory.offload import Store
from ringspan.torch.model.memory.segments import Segments, checkpointed
from tests.cases import long
from tests.torch.models import build, relative, tokens

LAYERS, SIZE = 7, 8


class Layer(nn.Module):
    """Counts its forward passes and notes what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(SIZE, SIZE), nn.Dropout(0.5)
        self.inputs: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(StorageWeakRef(x.untyped_storage()))
        return x + self.dropout(self.linear(x).float())


def run(layers: list[Layer], step: Callable[[Layer, Tensor], Tensor]) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(5, SIZE, requires_grad=True) * 1
    for layer in layers:
        x = step(layer, x)
    return x


def gradients(layers: list[Layer], out: Tensor) -> list[Tensor]:
    return list(
        torch.autograd.grad(
            out.square().sum(), [p for layer in layers for p in layer.parameters()]
        )
    )


@pytest.mark.parametrize(
    ("size", "autocast"), [(3, False), (2, True), (7, True), (9, False)]
)
def test_segments_keep_one_input_and_have_equal_gradients(size, autocast):
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    casting = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with casting:
        plain = run(layers, lambda layer, x: layer(x))
    expected = gradients(layers, plain)
    del plain
    for layer in layers:
        layer.inputs.clear()
    segments = Segments(size, Store(min_bytes=1 << 60), keeps_attention=False)
    with casting, segments.forward_pass():
        out = run(layers, lambda layer, x: segments.checkpoint(layer, layer, x))
    kept = [not layer.inputs[0].expired() for layer in layers]
    assert kept == [number % size == 0 for number in range(LAYERS)]
    torch.manual_seed(2)  # that backward draws other numbers is of no account
    state = torch.get_rng_state()
    for got, wanted in zip(gradients(layers, out), expected, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(torch.get_rng_state(), state)
    for number, layer in enumerate(layers):
        is_last = number % size == size - 1 or number == LAYERS - 1
        assert len(layer.inputs) == (2 if is_last else 3), number
    assert all(seen.expired() for layer in layers[1:] for seen in layer.inputs)


def test_without_gradients_nothing_is_kept():
    segments, layers = (
        Segments(2, Store(min_bytes=1 << 60), keeps_attention=False),
        [Layer() for _ in range(2)],
    )
    with torch.no_grad(), segments.forward_pass():
        run(layers, lambda layer, x: segments.checkpoint(layer, layer, x))
    assert all(seen.expired() for layer in layers[1:] for seen in layer.inputs)


def test_layers_between_which_something_happens_are_refused():
    segments, layers = (
        Segments(2, Store(min_bytes=1 << 60), keeps_attention=False),
        [Layer() for _ in range(2)],
    )
    with (
        segments.forward_pass(),
        pytest.raises(rs.UnsupportedError, match="layers_per_checkpoint=1"),
    ):
        run(layers, lambda layer, x: segments.checkpoint(layer, layer, 2 * x))
    with (
        segments.forward_pass(),
        pytest.raises(rs.UnsupportedError, match="layers_per_checkpoint=1"),
    ):
        run(layers, lambda layer, x: segments.checkpoint(layer, partial(layer, x=x)))
    with segments.forward_pass():  # and a new pass begins anew
        run(layers, lambda layer, x: segments.checkpoint(layer, layer, x))


def test_a_layer_that_raised_takes_no_part_in_later_passes():
    def broken(x: Tensor) -> Tensor:
        raise ValueError(f"no {tuple(x.shape)}")

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match="no ") as held:
        checkpointed(broken, x, use_reentrant=False)
    (x * x).sum().backward()
    assert held.value and torch.equal(x.grad, 2 * x)


def deep_step(mesh: Any, kind: str, layers: int, options: dict[str, Any]) -> Any:
    """Gradients of a batch and of two in one backward pass; what is still whole, layer by layer, after it."""
    model: Any = rs.parallelize(
        build(kind, num_hidden_layers=layers).train(), mesh, **options
    )
    # so that FSDP does not see when the first layer is done
    model.get_input_embeddings().requires_grad_(False)
    for seeds in ((1,), (2, 3)):
        parts = [
            rs.shard_batch(
                dict.fromkeys(("input_ids", "labels"), tokens(1, 37, seed)), mesh
            )
            for seed in seeds
        ]
        torch.stack([model(**part).loss for part in parts]).sum().backward()
    sizes = [
        sum(p.to_local().numel() for p in layer.parameters())
        for layer in model.base_model.layers
    ]
    return {
        name: p.grad.full_tensor()
        for name, p in model.named_parameters()
        if p.requires_grad
    }, sizes


@pytest.mark.parametrize(("size", "checkpoint"), [(2, "full"), *long((3, "attention"))])
def test_segments_of_layers_that_fsdp_splits(pool, checkpoint, size):
    options = {"checkpoint": checkpoint, "layers_per_checkpoint": size}
    expected = pool.run(deep_step, 2, "llama", 5, {"checkpoint": "none"})
    for (got, sizes), (wanted, split) in zip(
        pool.run(deep_step, 2, "llama", 5, options), expected, strict=True
    ):
        assert sizes == split
        assert max(relative(got[name], g) for name, g in wanted.items()) < 1e-6


@pytest.mark.parametrize(
    ("layers", "size", "inputs"),
    [
        (1, 1, 1),
        (2, 1, 2),
        (4, 2, 3),
        (12, 3, 6),
        (26, 4, 10),
        (32, 4, 11),
        (126, 9, 22),
    ],
)
def test_the_most_frugal_segment_is_about_the_root_of_layers(layers, size, inputs):
    assert (frugal_segment(layers), num_inputs(layers, size)) == (size, inputs)
    assert num_inputs(layers, 1) == layers == num_inputs(layers, layers)


def ones() -> tuple[Tensor]:
    return (torch.ones(3),)


def others() -> tuple[Tensor, Tensor]:
    return torch.ones(3), torch.ones(5)


def test_a_recomputation_takes_no_results_of_another_operator():
    store = Store(min_bytes=sys.maxsize)
    kept: list[tuple[Any, ...]] = []
    with segments._keeping(store, kept):
        handled(ones)
    with segments._replaying(store, list(kept), again=True):
        assert handled(ones)[0].tolist() == [1, 1, 1]
    with (
        segments._replaying(store, kept),
        pytest.raises(RuntimeError, match=r"asks for .*others, where .*ones"),
    ):
        handled(others)
