"""The blockwise loss against PyTorch's cross-entropy of whole logits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import ringspan as rs
from tests.torch.models import relative


def whole(hidden, weight, bias, targets):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    return cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ignored", ["some", "all", "none"])
def test_loss_and_gradients_are_those_of_whole_logits(chunk_tokens, with_bias, ignored):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (45, 101))
    bias = torch.randn(101, generator=generator, requires_grad=True) if with_bias else None
    targets = torch.randint(0, 101, (45,), generator=generator)
    targets[{"some": slice(0, 20), "all": slice(None), "none": slice(0, 0)}[ignored]] = -100
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    ours = rs.blockwise_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=chunk_tokens)
    theirs = whole(hidden, weight, bias, targets)
    assert ours.dtype == torch.float32
    assert relative(ours, theirs) < 1e-6 or ours == theirs == 0
    pairs = zip(torch.autograd.grad(ours * 0.3, inputs), torch.autograd.grad(theirs * 0.3, inputs), strict=True)
    for x, expected in pairs:
        assert x.dtype == expected.dtype
        assert relative(x, expected) < 1e-6 or (not expected.any() and not x.any())


def test_bfloat16_is_close_to_the_float32_truth():
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 32, generator=generator).bfloat16().requires_grad_() for n in (64, 128))
    targets = torch.randint(0, 128, (64,), generator=generator)
    ours = rs.blockwise_cross_entropy(hidden, weight, targets, chunk_tokens=16)
    truth = whole(hidden.float(), weight.float(), None, targets)
    assert relative(ours, truth) < 2e-3
    for x, expected in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(truth, (hidden, weight)), strict=True
    ):
        assert x.dtype == torch.bfloat16 and relative(x, expected) < 1e-2


def test_the_inputs_survive():
    hidden, weight = torch.randn(8, 4), torch.randn(9, 4)
    kept = hidden.clone(), weight.clone()
    rs.blockwise_cross_entropy(hidden, weight, torch.zeros(8, dtype=torch.int64))
    assert torch.equal(hidden, kept[0]) and torch.equal(weight, kept[1])


def test_a_chunk_of_no_tokens_is_refused():
    with pytest.raises(rs.ConfigError, match="loss_chunk_tokens"):
        rs.blockwise_cross_entropy(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1).long(), chunk_tokens=0)
