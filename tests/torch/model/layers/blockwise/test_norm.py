"""Norms in blocks: which they are, the same loss and gradients, and what they keep."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringspan as rs
from ringspan.torch.model.layers.blockwise.blocks import Blockwise, run_in_blocks
from ringspan.torch.model.layers.blockwise.feedforward import find_norms
from tests.torch.models import build, check, kept_bytes, step


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("llama", 5),  # two in each of two layers, and the last one
        ("qwen3", 9),  # and two on heads
        ("gemma3_text", 13),
        ("opt", 0),  # PyTorch's own
    ],
)
def test_any_model_has_the_same_gradients_with_norms_in_chunks(kind, number):
    plain = step(build(kind).train())
    model = build(kind).train()
    assert len(find_norms(model)) == number
    run_in_blocks(find_norms(model), 5, "norm_chunk_tokens")
    assert sum(isinstance(module, Blockwise) for module in model.modules()) == number
    check([step(model)], plain, (1e-6, 1e-6))


def test_it_keeps_its_16_bit_input_alone():
    model = build("llama").to(torch.bfloat16)
    [norm, *_] = find_norms(model)
    hidden = torch.randn(1, 30, 64).bfloat16().requires_grad_()
    assert kept_bytes(norm, hidden) > 3 * hidden.nbytes  # in float32, and normed
    run_in_blocks(find_norms(model), 7, "norm_chunk_tokens")
    assert kept_bytes(norm, hidden) == hidden.nbytes


class Gated(nn.Module):
    """A norm that may be given more than hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        hidden = hidden if gate is None else hidden * gate
        return self.weight * hidden * hidden.pow(2).mean(-1, keepdim=True).rsqrt()


class OverTokens(Gated):
    """Not a norm of each token."""

    def forward(self, hidden: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.weight * hidden * hidden.pow(2).mean((1, 2), keepdim=True).rsqrt()


@pytest.mark.parametrize(
    "norm",
    [Gated(), OverTokens(), nn.LayerNorm(64)],
    ids=lambda norm: type(norm).__name__,
)
def test_what_blocks_would_break_or_not_help_is_left_alone(norm):
    model: Any = nn.ModuleList([norm])
    assert find_norms(model) == []


def test_an_argument_that_is_none_changes_nothing():
    norm, hidden = Gated(), torch.randn(1, 5, 64)
    run_in_blocks([norm], 2, "norm_chunk_tokens")
    assert torch.equal(norm(hidden, gate=None), Gated()(hidden))
    with pytest.raises(
        rs.UnsupportedError, match="called with more than hidden states"
    ):
        norm(hidden, gate=torch.ones(64))


def test_no_tokens_at_a_time_are_refused():
    with pytest.raises(
        rs.ConfigError,
        match="norm_chunk_tokens must be at least 1, got -1; 0 is for none",
    ):
        run_in_blocks(find_norms(build("llama")), -1, "norm_chunk_tokens")


def test_few_tokens_are_normed_at_once():
    model = build("llama").to(torch.bfloat16)
    [norm, *_] = find_norms(model)
    few, many = (torch.randn(1, n, 64).bfloat16().requires_grad_() for n in (9, 10))
    whole = kept_bytes(norm, few)
    run_in_blocks([norm], 5, "norm_chunk_tokens", from_tokens=10)
    assert kept_bytes(norm, few) == whole > few.nbytes
    assert kept_bytes(norm, many) == many.nbytes
