"""The embedding's gradient against float64: sums over many equal tokens, their memory, tied and sharded weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

import ringspan as rs
from ringspan.measure.trace.tracker import MemoryTracker
from ringspan.torch.model.layers import embedding
from ringspan.torch.model.layers.embedding import (
    embedding_gradient,
    sum_embedding_gradients,
)
from tests.cases import long
from tests.torch.models import build, relative

ROWS, SIZE, TOKENS = 37, 21, 100_003


def looked_up(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens of which six in seven are alike, and gradients that do not cancel."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, ROWS, (TOKENS,), generator=generator)
    tokens[torch.arange(TOKENS) % 7 > 0] = 5
    return tokens, (torch.randn(TOKENS, SIZE, generator=generator) + 0.5).to(dtype)


def truth(tokens: Tensor, gradient: Tensor) -> Tensor:
    return torch.zeros(ROWS, SIZE, dtype=torch.float64).index_add_(
        0, tokens, gradient.double()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numbers", [1, 5 * (ROWS + 2 * TOKENS), 1 << 23])
def test_a_hundred_thousand_equal_tokens_add_up_to_the_last_bit(
    dtype, numbers, monkeypatch
):
    monkeypatch.setattr(embedding, "_NUMBERS", numbers)
    tokens, gradient = looked_up(dtype)
    assert torch.equal(
        embedding_gradient(gradient, tokens, ROWS), truth(tokens, gradient).to(dtype)
    )


class Scaled(nn.Embedding):
    """An embedding that does more than look up, as Gemma's."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 3.0


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("padding", [None, 5])
def test_any_embedding_of_a_model_has_it(kind, padding):
    tokens, gradient = looked_up(torch.bfloat16)
    model: Any = nn.Sequential(kind(ROWS, SIZE, padding_idx=padding)).bfloat16()
    plain = model[0](tokens)
    sum_embedding_gradients(model)
    out = model[0](tokens.view(1, -1))
    assert torch.equal(out[0], plain) and type(model[0]).__name__ == kind.__name__
    out.backward(gradient[None])
    expected = truth(tokens, (3 if kind is Scaled else 1) * gradient)
    if padding is not None:
        expected[padding] = 0
    assert torch.equal(model[0].weight.grad, expected.bfloat16())


@pytest.mark.parametrize(
    "option", [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}]
)
def test_an_embedding_with_a_gradient_of_its_own_keeps_it(option):
    model: Any = nn.Sequential(nn.Embedding(ROWS, SIZE, **option))
    sum_embedding_gradients(model)
    assert type(model[0]) is nn.Embedding


def test_memory_is_for_some_columns_at_any_length(monkeypatch):
    """Beside the result: a column in float64 of all rows and tokens, and what the next one is made from."""
    monkeypatch.setattr(embedding, "_NUMBERS", 1)
    tokens, gradient = looked_up(torch.bfloat16)
    with MemoryTracker() as tracker:
        embedding_gradient(gradient, tokens, ROWS)
    assert tracker.peak.total_bytes <= 2 * ROWS * SIZE + 8 * (ROWS + 2 * TOKENS)
    assert tracker.peak.total_bytes < gradient.nbytes / 2, (
        "of the whole in float32, twice"
    )


LENGTH = 2048


def ring_gradient(mesh: DeviceMesh, kind: str, options: dict[str, Any]) -> Any:
    """Of an embedding whose look-ups of one token all get the gradient 1, in bfloat16 through FSDP2."""
    model = build(kind, max_position_embeddings=LENGTH, vocab_size=96)
    if options.get("compute_dtype") is None:
        model = model.bfloat16()
    model = rs.parallelize(model, mesh, **options)
    table = model.get_input_embeddings()
    table.register_forward_hook(lambda module, given, out: Ones.apply(out))
    tokens = torch.full((1, LENGTH), 5)
    batch = rs.shard_batch({"input_ids": tokens, "labels": tokens}, mesh)
    batch["shift_labels"].fill_(-100)  # the loss and all of its gradients are 0
    model(**batch).loss.backward()
    gradient = table.weight.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Ones(torch.autograd.Function):
    """Passes on what it is given and a gradient of 1, whatever comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ones_like(gradients[0])


CASES = [
    *long(("llama", 2, 1, {})),
    ("llama-tied", 2, 1, {"compute_dtype": torch.bfloat16}),  # over float32 parameters
    *long(("gemma3_text", 2, 1, {})),
    ("llama-tied", 4, 2, {}),
]


@pytest.mark.parametrize(("kind", "ranks", "tp", "options"), CASES)
def test_a_sharded_model_counts_the_tokens_of_a_long_sequence(
    pool, kind, ranks, tp, options
):
    """In bfloat16 1,024 ones on each of two ranks would make 256 each."""
    scale = 8.0 if kind == "gemma3_text" else 1.0
    for gradient in pool.run(ring_gradient, ranks, kind, options, tp=tp):
        expected = torch.zeros_like(gradient)
        expected[5] = scale * LENGTH
        assert relative(gradient, expected) == 0.0


class Asking(nn.Embedding):
    """An embedding that looks up by a call of its own."""

    options: dict[str, Any]

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(input=tokens, weight=self.weight, **self.options)


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_idx": -2}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}],
)
def test_what_a_look_up_asks_for_is_not_dropped(options):
    given = torch.tensor([[1, 5, 5, 3, 1, 5]])
    results = []
    for changes in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Asking(7, 4))
        model[0].options = options
        if changes:
            sum_embedding_gradients(model)
        out = model(given)
        (out * torch.arange(24.0).view(1, 6, 4)).sum().backward()
        results.append((out.detach(), model[0].weight.grad, model[0].weight.detach()))
    for one, other in zip(*results, strict=True):
        assert relative(one, other) < 1e-6
