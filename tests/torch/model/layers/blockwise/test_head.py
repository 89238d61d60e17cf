"""Heads that are more than their weight: loss and gradients on the ring against one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations, parametrize

import ringspan as rs
from ringspan.torch.data.loss_blocks import LossOptions
from ringspan.torch.model.layers.blockwise.head import (
    called_cross_entropy,
    is_its_weight,
)
from ringspan.torch.model.support import refuse_unsupported
from ringspan.torch.model.view import view_of
from tests.cases import few, long, pairwise
from tests.torch.data.test_cross_entropy import BOUNDS, EXTRAS, example, whole
from tests.torch.models import build, check, relative, step, tokens


class Scaled(nn.Linear):
    """A head with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 1.5 * super().forward(input)


class Adapted(nn.Module):
    """A head beside which an adapter learns, as PEFT's."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.base_layer = head.requires_grad_(False)
        self.down = nn.Linear(head.in_features, 3, bias=False)
        self.up = nn.Linear(3, head.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base_layer(hidden) + self.up(self.down(hidden))


class InFloat32(nn.Sequential):
    """What gives logits in float32, as in PEFT's examples."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).float()


class Added(nn.Module):
    """The sum of two matrices, whose gradients are one tensor."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.randn(sizes) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.extra


def alter(model: Any, how: str) -> None:
    torch.manual_seed(3)
    head = model.lm_head
    match how:
        case "hook":
            head.register_forward_hook(lambda _, __, out: out * 0.5)
        case "hook before":
            head.register_forward_pre_hook(lambda _, given: (given[0] * 2.0,))
        case "hook with parameters":
            head.register_parameter("shift", nn.Parameter(torch.randn(97)))
            head.register_forward_hook(lambda module, _, out: out + module.shift)
        case "hook with others' parameters":
            model.register_parameter("shift", nn.Parameter(torch.randn(97)))
            head.register_forward_hook(lambda _, __, out: out + model.shift)
        case "own forward":
            plain = head.forward
            head.forward = lambda hidden: plain(hidden).square()
        case "subclass":
            model.lm_head = Scaled(64, 97, bias=False)
        case "adapted":
            model.lm_head = Adapted(head)
        case "float32":
            model.lm_head = InFloat32(head)
        case "weight norm":
            parametrizations.weight_norm(head)
        case "sum":
            parametrize.register_parametrization(head, "weight", Added((97, 64)))
        case "two layers":
            model.lm_head = nn.Sequential(
                nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 97)
            )


HOWS = [
    *(
        "hook",
        "hook before",
        "hook with parameters",
        "hook with others' parameters",
        "own forward",
        "subclass",
    ),
    *("adapted", "float32", "weight norm", "sum", "two layers"),
]


def ring_step(mesh: DeviceMesh, kind: str, how: str, options: Any) -> Any:
    model = build(kind)
    alter(model, how)
    rs.parallelize(model, mesh, **options)
    ids = tokens(1, 37)
    with torch.no_grad():
        first = model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss
    found = step(model, mesh)
    assert relative(first, found[0]) < 1e-6
    return found


def one_step(kind: str, how: str) -> Any:
    model = build(kind)
    alter(model, how)
    return step(model)


@pytest.mark.parametrize(
    ("kind", "how", "replicate", "options"),
    [
        *few(
            (
                ("llama", how, 1, {"loss_chunk_tokens": 5})
                for how in HOWS
                if how not in ("hook", "subclass")
            ),
            3,
        ),
        ("gemma2", "hook", 1, {"checkpoint": "none"}),  # which has a softcap
        *long(("granite", "adapted", 1, {"checkpoint": "none"})),  # and a scale
        ("llama-tied", "subclass", 1, {"checkpoint": "none"}),
        # Each of two replicas has the same example: twice the sum over twice the count.
        *long(("llama", "hook", 2, {})),
        ("llama", "adapted", 2, {}),
    ],
)
def test_a_head_that_is_more_than_its_weight_is_called(
    pool, kind, how, replicate, options
):
    expected = one_step(kind, how)
    assert relative(expected[0], one_step(kind, "as it is")[0]) > 1e-4 or how in (
        "float32",
        "weight norm",
    )
    check(
        pool.run(ring_step, 2 * replicate, kind, how, options, replicate=replicate),
        expected,
    )


@pytest.mark.parametrize(
    ("chunk_tokens", "extras", "dtype", "ignored"),
    pairwise([7, 1, 64], EXTRAS, [torch.float64, torch.float32], ["some", "all"]),
)
def test_loss_and_gradients_are_those_of_whole_logits(
    chunk_tokens, extras, dtype, ignored
):
    bound = BOUNDS[dtype]
    (hidden, weight, bias), targets = example(dtype, ignored=ignored)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    head = lambda x: x @ weight.T + bias  # noqa: E731
    module: Any = Called(head)
    ours = called_cross_entropy(
        hidden, module, targets, LossOptions(chunk_tokens=chunk_tokens, **extras)
    )
    truth = whole(exact[0], exact[1], exact[2], targets, **extras)
    assert ours.dtype == dtype and (relative(ours, truth) < bound or ours == truth == 0)
    pairs = zip(
        torch.autograd.grad(ours * 0.3, (hidden, weight, bias)),
        torch.autograd.grad(truth * 0.3, exact),
        strict=True,
    )
    for found, expected in pairs:
        assert relative(found, expected) < bound or not (found.any() or expected.any())


class Called(nn.Module):
    """A module that uses tensors which are not its own."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


def test_the_head_sums_in_float32_and_repeats_its_dropout():
    hidden, weight = (
        torch.ones(320, 1).bfloat16(),
        torch.zeros(2, 1).bfloat16().requires_grad_(),
    )
    module = Called(lambda x: x @ weight.T)
    called_cross_entropy(
        hidden, module, torch.zeros(320).long(), LossOptions(chunk_tokens=1)
    ).backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [-160.0, 160.0]

    drawn: list[Tensor] = []
    hidden.requires_grad_()
    dropping = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 2).bfloat16())
    dropping[0].register_forward_hook(lambda _, __, out: drawn.append(out.detach()))
    loss = called_cross_entropy(
        hidden, dropping, torch.zeros(320).long(), LossOptions(chunk_tokens=64)
    )
    after = torch.get_rng_state()
    loss.backward()
    assert torch.equal(after, torch.get_rng_state())
    assert (
        len(drawn) == 10
        and all(map(torch.equal, drawn[:5], drawn[5:]))
        and not torch.equal(drawn[0], drawn[1])
    )
    assert hidden.grad is not None and torch.equal(
        hidden.grad == 0, torch.cat(drawn[:5], 1)[0] == 0
    )


def test_what_was_computed_before_is_refused():
    weight = torch.randn(9, 4, requires_grad=True)
    before = weight * 2
    hidden, targets = torch.randn(8, 4, requires_grad=True), torch.zeros(8).long()
    with pytest.raises(rs.UnsupportedError, match="computed before"):
        called_cross_entropy(
            hidden, Called(lambda x: x @ before.T), targets, LossOptions()
        )


def test_only_a_linear_layer_as_it_is_is_its_weight():
    assert is_its_weight(nn.Linear(3, 4)) and is_its_weight(nn.Linear(3, 4, bias=False))
    for how in HOWS:
        model = build("llama")
        alter(model, how)
        assert not is_its_weight(model.lm_head), how


def mix(_: Any, __: Any, out: Tensor) -> Tensor:
    return out - out.mean(1, keepdim=True)


def test_a_head_that_mixes_tokens_is_refused():
    model = build("llama")
    model.lm_head.register_forward_hook(mix)
    with pytest.raises(rs.UnsupportedError, match=r"the head .*mixes tokens"):
        refuse_unsupported(view_of(model))


def late_hook(mesh: DeviceMesh, hook: Any) -> Any:
    model = rs.parallelize(build("llama"), mesh, loss_chunk_tokens=5)
    step(model, mesh)
    model.zero_grad()
    model.lm_head.register_forward_hook(hook)
    return step(model, mesh)


def halve(_: Any, __: Any, out: Tensor) -> Tensor:
    return out * 0.5


def test_a_hook_that_comes_after_parallelize_is_honoured(pool):
    check(pool.run(late_hook, 2, halve), one_step("llama", "hook"))


@pytest.mark.parametrize(
    ("hook", "tp", "message"), [(mix, 1, "mixes tokens"), (halve, 2, "use tp=1")]
)
def test_a_late_hook_that_cannot_be_honoured_is_refused(pool, hook, tp, message):
    for outcome in pool.outcomes(late_hook_of_even, 2, hook, tp=tp):
        assert isinstance(outcome, rs.UnsupportedError) and message in str(outcome)


def late_hook_of_even(mesh: DeviceMesh, hook: Any) -> None:
    model = rs.parallelize(build("llama", vocab_size=98), mesh)
    model.lm_head.register_forward_hook(hook)
    step(model, mesh)


def chunked_vocabulary(mesh: DeviceMesh) -> None:
    model = build("llama")
    alter(model, "hook")
    rs.parallelize(model, mesh, loss_chunk_vocabulary=50)


def test_blocks_of_vocabulary_need_a_head_that_is_its_weight(pool):
    for outcome in pool.outcomes(chunked_vocabulary, 2):
        assert isinstance(
            outcome, rs.UnsupportedError
        ) and "loss_chunk_vocabulary=50" in str(outcome)
