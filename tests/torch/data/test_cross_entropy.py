"""The blockwise loss against PyTorch's cross-entropy of whole logits in float64, and against the arithmetic of its
memory.
"""

import sys
from functools import partial
from itertools import cycle, product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

import ringspan as rs
from ringspan.core.costs import loss_bytes
from ringspan.measure.machine import allocated_bytes
from ringspan.torch.data import cross_entropy as loss_module
from tests.cases import long, pairwise
from tests.torch.models import relative


def whole(
    hidden,
    weight,
    bias,
    targets,
    *,
    logit_scale=1.0,
    softcap=None,
    z_loss=0.0,
    label_smoothing=0.0,
):
    logits = logit_scale * (hidden @ weight.T + (0 if bias is None else bias))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    squares = logits.logsumexp(-1)[targets != -100].square().sum()
    plain = cross_entropy(
        logits,
        targets,
        ignore_index=-100,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return plain + z_loss * squares


def example(dtype, tokens=45, size=16, vocabulary=101, ignored="some", with_bias=True):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(n, size, generator=generator).to(dtype)
        for n in (tokens, vocabulary)
    )
    bias = torch.randn(vocabulary, generator=generator).to(dtype) if with_bias else None
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[
        {"some": slice(0, 20), "all": slice(None), "none": slice(0, 0)}[ignored]
    ] = -100
    return [
        None if x is None else x.requires_grad_() for x in (hidden, weight, bias)
    ], targets


def check(dtype, bound, chunks, extras, **shape: Any):
    inputs, targets = example(dtype, **shape)
    exact = [
        None if x is None else x.detach().double().requires_grad_() for x in inputs
    ]
    ours = rs.blockwise_cross_entropy(
        *inputs[:2], targets, bias=inputs[2], **chunks, **extras
    )
    truth = whole(*exact, targets, **extras)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative(ours, truth) < bound or ours == truth == 0
    given, wanted = ([x for x in xs if x is not None] for xs in (inputs, exact))
    pairs = zip(
        torch.autograd.grad(ours * 0.3, given),
        torch.autograd.grad(truth * 0.3, wanted),
        strict=True,
    )
    for (x, expected), source in zip(pairs, given, strict=True):
        assert x.dtype == source.dtype and x.shape == source.shape
        assert relative(x, expected) < bound or not (expected.any() or x.any())


BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-6}
CHUNKS = [(7, 13), (1, None), (7, 1), (64, 101), (1000, 50), (1000, 5000)]
EXTRAS = [
    {},
    {"softcap": 3.0},
    {"z_loss": 0.01, "label_smoothing": 0.1},
    {"softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.3},
    {"logit_scale": 0.3},
    {"logit_scale": 1.7, "softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.3},
]


def test_loss_and_gradients_are_those_of_whole_logits():
    for chunks, extras, dtype in pairwise(CHUNKS, EXTRAS, list(BOUNDS)):
        check(
            dtype,
            BOUNDS[dtype],
            dict(zip(("chunk_tokens", "chunk_vocabulary"), chunks, strict=True)),
            extras,
        )


@pytest.mark.parametrize(
    ("chunks", "extras", "dtype"), zip(CHUNKS, EXTRAS, cycle(BOUNDS), strict=False)
)
def test_the_loss_of_each_token_and_any_function_of_it(chunks, extras, dtype):
    bound = BOUNDS[dtype]
    inputs, targets = example(dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    chunks = dict(zip(("chunk_tokens", "chunk_vocabulary"), chunks, strict=True))
    ours = rs.blockwise_cross_entropy(
        *inputs[:2], targets, bias=inputs[2], reduction="none", **chunks, **extras
    )
    one = [
        (exact[0][i : i + 1], *exact[1:], targets[i : i + 1])
        for i in range(len(targets))
    ]
    truth = torch.stack([whole(*each, **extras) for each in one])
    assert (
        ours.dtype == dtype
        and relative(ours, truth) < bound
        and torch.equal(ours == 0, targets == -100)
    )
    factors = torch.linspace(-1, 2, len(targets))
    for _ in range(2):  # what it keeps is good for as many backward passes as there are
        found = torch.autograd.grad((ours * factors).sum(), inputs, retain_graph=True)
        wanted = torch.autograd.grad((truth * factors).sum(), exact, retain_graph=True)
        assert max(map(relative, found, wanted)) < bound
    # NaN where there is no target, as a mean over none is
    undefined = ours / (targets != -100)
    assert all(x.isfinite().all() for x in torch.autograd.grad(undefined.sum(), inputs))


def test_tokens_without_targets_and_heads_without_biases():
    extras = {"z_loss": 0.01, "label_smoothing": 0.1}
    for ignored, with_bias, chunk_vocabulary in product(
        ["some", "all", "none"], [False, True], [None, 30]
    ):
        chunks = {"chunk_tokens": 7, "chunk_vocabulary": chunk_vocabulary}
        check(torch.float32, 1e-6, chunks, extras, ignored=ignored, with_bias=with_bias)


@pytest.mark.parametrize("chunk_vocabulary", [None, 30])
def test_bfloat16_is_close_to_the_truth(chunk_vocabulary):
    check(
        torch.bfloat16,
        1e-2,
        {"chunk_tokens": 16, "chunk_vocabulary": chunk_vocabulary},
        {},
        vocabulary=128,
    )


def test_large_logits_do_not_overflow():
    hidden = torch.full((3, 4), 100.0, requires_grad=True)
    weight = torch.eye(4).mul(200).requires_grad_()
    for chunk_vocabulary in (None, 1):
        ours = rs.blockwise_cross_entropy(
            hidden, weight, torch.arange(3), chunk_vocabulary=chunk_vocabulary
        )
        assert relative(ours, whole(hidden, weight, None, torch.arange(3))) < 1e-6
        assert torch.autograd.grad(ours, hidden)[0].isfinite().all()


def test_the_gradient_of_the_head_adds_up_in_float32():
    """320 equal parts of a bfloat16 gradient: in bfloat16 their sum would stop growing at 256 of them."""
    hidden, weight = (
        torch.ones(320, 1).bfloat16(),
        torch.zeros(2, 1).bfloat16().requires_grad_(),
    )
    rs.blockwise_cross_entropy(
        hidden, weight, torch.zeros(320).long(), chunk_tokens=1
    ).backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [-160.0, 160.0]


def test_inputs_survive_and_gradients_are_computed_on_demand():
    hidden, weight = torch.randn(8, 4), torch.randn(9, 4, requires_grad=True)
    kept = hidden.clone(), weight.clone()
    targets = torch.zeros(8, dtype=torch.int64)
    rs.blockwise_cross_entropy(hidden, weight, targets).backward()
    assert torch.equal(hidden, kept[0]) and torch.equal(weight, kept[1])
    assert hidden.grad is None and weight.grad is not None
    wide = torch.zeros(2000, 4, requires_grad=True)
    with torch.no_grad():
        held = allocated_bytes(
            lambda: rs.blockwise_cross_entropy(hidden, wide, targets, chunk_tokens=1)
        )
    assert held < wide.nbytes / 2, "no gradient of the weight without a backward pass"


def test_a_second_backward_pass_is_refused():
    hidden = torch.randn(8, 4, requires_grad=True)
    loss = rs.blockwise_cross_entropy(hidden, torch.randn(9, 4), torch.zeros(8).long())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


@pytest.mark.parametrize(
    ("chunk_tokens", "chunk_vocabulary", "dtype", "softcap"),
    [
        (512, 8192, torch.float32, 5.0),
        *long(
            (512, 8192, torch.bfloat16, None),
            (512, None, torch.float32, None),
            (1024, 5000, torch.bfloat16, 5.0),
        ),
    ],
)
def test_memory_is_that_of_one_block_at_any_length(
    chunk_tokens, chunk_vocabulary, dtype, softcap
):
    vocabulary, size = 16384, 48
    chunks = {"chunk_tokens": chunk_tokens, "chunk_vocabulary": chunk_vocabulary}
    expected = loss_bytes(
        size, vocabulary, dtype.itemsize, **chunks, softcap=softcap is not None
    ).peak
    beside = []
    for tokens in (1024, 2000):
        (hidden, weight, _), targets = example(
            dtype, tokens, size, vocabulary, "none", with_bias=False
        )
        loss = partial(
            rs.blockwise_cross_entropy,
            hidden,
            weight,
            targets,
            softcap=softcap,
            **chunks,
        )
        held = allocated_bytes(lambda loss=loss: loss().backward())
        beside.append(held - hidden.nbytes)
        # Where the processor has no instructions for bfloat16, a product holds its result in float32 too.
        rows, columns = (
            hidden[:chunk_tokens].detach(),
            weight[:chunk_vocabulary].detach().T,
        )
        packed = (
            allocated_bytes(lambda rows=rows, columns=columns: rows @ columns)
            - (rows @ columns).nbytes
        )
        assert 0.97 * expected < beside[-1] < 1.03 * expected + packed
    assert abs(beside[1] - beside[0]) < 0.01 * expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 2.5}, r"loss_chunk_tokens must be an integer, got 2\.5"),
        ({"chunk_tokens": True}, "loss_chunk_tokens must be an integer, got True"),
        (
            {"chunk_vocabulary": "8"},
            r"loss_chunk_vocabulary must be an integer, got '8' \(str\); None is for all",
        ),
        ({"z_loss": "1"}, "z_loss must be a plain number, got '1'"),
        ({"z_loss": float("inf")}, "z_loss must be finite, got inf"),
        ({"logit_scale": torch.tensor(2.0)}, "logit_scale must be a plain number, got"),
        ({"chunk_tokens": 0}, "loss_chunk_tokens"),
        ({"chunk_vocabulary": 0}, "loss_chunk_vocabulary"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"softcap": 0.0}, "softcap"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"impl": "magic"}, "magic"),
        ({"impl": "liger"}, "runs on CUDA, not on cpu"),
        (
            {"impl": "liger", "reduction": "none"},
            "use 'blockwise' for reduction='none'",
        ),
        ({"reduction": "mean"}, "unknown reduction 'mean'; choose one of sum, none"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(rs.ConfigError, match=message):
        rs.blockwise_cross_entropy(
            torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1).long(), **options
        )


@pytest.mark.parametrize("target", [-1, 9, -101])
def test_targets_outside_of_the_vocabulary_are_refused(target):
    with pytest.raises(rs.UnsupportedError, match=str(target)):
        rs.blockwise_cross_entropy(
            torch.zeros(2, 4), torch.zeros(9, 4), torch.tensor([0, target])
        )


def test_ligers_kernel_is_chosen_on_cuda_if_it_sums_in_float32(monkeypatch):
    """The choice alone: what stands for the package here never computes."""

    def fused(hidden, weight, target, bias=None, accum_dtype=None): ...

    def older(hidden, weight, target, bias=None): ...

    package, transformers = (
        ModuleType("liger_kernel"),
        ModuleType("liger_kernel.transformers"),
    )
    functional: Any = ModuleType("liger_kernel.transformers.functional")
    transformers.functional = functional  # type: ignore[attr-defined]
    for module in (package, transformers, functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(loss_module.importlib.util, "find_spec", lambda name: package)
    on_cuda, on_cpu = torch.empty(1, device="meta"), torch.empty(1)
    monkeypatch.setattr(loss_module, "_is_cuda", lambda x: x is on_cuda)
    functional.liger_fused_linear_cross_entropy = fused
    assert loss_module._choose_liger("auto", on_cuda) is fused
    assert loss_module._choose_liger("auto", on_cpu) is None
    assert loss_module._choose_liger("blockwise", on_cuda) is None
    assert loss_module._choose_liger("auto", on_cuda, logit_scale=0.5) is None
    assert loss_module._choose_liger("auto", on_cuda, reduction="none") is None
    with pytest.raises(rs.ConfigError, match=r"logit_scale=0\.5"):
        loss_module._choose_liger("liger", on_cuda, logit_scale=0.5)
    functional.liger_fused_linear_cross_entropy = older
    assert loss_module._choose_liger("auto", on_cuda) is None
    with pytest.raises(rs.ConfigError, match="pip install"):
        loss_module._choose_liger("liger", on_cuda)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("chunk_vocabulary", [None, 17])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_under_autocast_hidden_states_may_differ_in_dtype(
    dtypes, chunk_vocabulary, reduction
):
    """A final norm that keeps the dtype of its input gives bfloat16 where weights are float32 (Gemma)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=generator).to(dtypes[0]).requires_grad_()
    weight = torch.randn(50, 8, generator=generator).to(dtypes[1]).requires_grad_()
    targets = torch.randint(0, 50, (23,), generator=generator)
    expected = cross_entropy(
        hidden.double() @ weight.double().T, targets, reduction="sum"
    )
    wanted = torch.autograd.grad(expected, (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = rs.blockwise_cross_entropy(
            hidden,
            weight,
            targets,
            chunk_tokens=9,
            chunk_vocabulary=chunk_vocabulary,
            reduction=reduction,
        ).sum()
    found = torch.autograd.grad(loss, (hidden, weight))
    assert relative(loss, expected) < 1e-2
    for x, right in zip(found, wanted, strict=True):
        assert x.dtype == right.dtype and relative(x, right) < 2e-2


def share_differently(mesh: DeviceMesh, what: str) -> None:
    odd = mesh.get_rank() == 1
    hidden, weight = (
        torch.zeros(5 if odd and what == "tokens" else 4, 8),
        torch.zeros(10, 8),
    )
    targets = torch.zeros(len(hidden), dtype=torch.long)
    softcap = 2.0 if odd and what == "softcap" else None
    rs.blockwise_cross_entropy(
        hidden, weight, targets, softcap=softcap, group=mesh["ring"].get_group()
    )


@pytest.mark.parametrize("what", ["tokens", "softcap"])
def test_ranks_that_share_a_vocabulary_but_differ_raise(pool, what):
    for outcome in pool.outcomes(share_differently, 2, what):
        assert isinstance(outcome, rs.PeerMismatch)
