"""Preparations of passes: made once for all layers, and anew when anything that they depend on has changed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ringspan as rs
from ringspan.core.remembered import Remembered
from ringspan.torch.engine.attention import prepared, request


def tensors(tokens=16, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, tokens, 8, generator=draw, dtype=dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


@pytest.fixture
def made(monkeypatch):
    """The passes and specs that are made from here on."""
    names = []
    monkeypatch.setattr(prepared, "_known", Remembered(100))
    monkeypatch.setattr(request, "_known", Remembered(100))
    prepare, spec_of = prepared._prepare, request._spec_of

    def noted_pass(what, *rest):
        names.append(what)
        return prepare(what, *rest)

    def noted_spec(*asked):
        names.append("spec")
        return spec_of(*asked)

    monkeypatch.setattr(prepared, "_prepare", noted_pass)
    monkeypatch.setattr(request, "_spec_of", noted_spec)
    return names


def test_layers_that_ask_alike_share_their_preparation(made):
    for _ in range(3):
        rs.ring_attention(*tensors()).sum().backward()
    assert made == ["spec", "forward", "backward"]


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": 32},
        {"dtype": torch.float64},
        {"mask": rs.sliding_window(4)},
        {"scale": 0.5},
        {"softcap": 3.0},
        {"slopes": torch.ones(4)},
        {"sinks": torch.ones(4)},
        {"kernel": "eager"},
        {"layout": "contiguous"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_differs_is_prepared_anew_and_equals_itself(made, changed):
    sizes = {name: changed[name] for name in ("tokens", "dtype") if name in changed}
    options = {name: value for name, value in changed.items() if name not in sizes}
    alone = rs.ring_attention(*tensors(**sizes), **options)
    made.clear()
    rs.ring_attention(*tensors())
    assert made == ["spec", "forward"]
    made.clear()
    assert torch.equal(rs.ring_attention(*tensors(**sizes), **options), alone)
    assert not made


def test_threads_are_part_of_a_preparation(made):
    before = torch.get_num_threads()
    rs.ring_attention(*tensors())
    try:
        torch.set_num_threads(before + 1)
        rs.ring_attention(*tensors())
    finally:
        torch.set_num_threads(before)
    assert made.count("forward") == 2 and made.count("spec") == 1


def test_what_is_refused_is_refused_after_its_equal_was_taken():
    rs.ring_attention(*tensors(), scale=1.0)
    with pytest.raises(rs.UnsupportedError, match="scale"):
        rs.ring_attention(*tensors(), scale=True)
    with pytest.raises(rs.MaskError, match="mask must be a mask"):
        rs.ring_attention(*tensors(), mask=["causal"])
    rs.ring_attention(*tensors(), sinks=torch.ones(4))
    with pytest.raises(rs.UnsupportedError, match="sinks is a sparse_coo tensor"):
        rs.ring_attention(*tensors(), sinks=torch.ones(4).to_sparse())


def test_old_preparations_are_forgotten(made, monkeypatch):
    monkeypatch.setattr(prepared, "_known", Remembered(2))
    monkeypatch.setattr(request, "_known", Remembered(2))
    for tokens in (4, 8, 12, 4):
        with torch.no_grad():
            rs.ring_attention(*tensors(tokens))
    assert made.count("forward") == made.count("spec") == 4
    assert len(prepared._known) == len(request._known) == 2


class Seen(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **kwargs or {})


def test_results_are_equal_without_the_dispatcher():
    def results():
        q, k, v = tensors()
        out = rs.ring_attention(q, k, v, sinks=torch.ones(4))
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    plain = results()
    with Seen() as seen:
        through = results()
    assert "ringspan.ring_attention.default" in seen.names
    assert "ringspan.ring_attention_backward.default" in seen.names
    assert all(map(torch.equal, plain, through))


def test_it_is_differentiated_once_without_the_dispatcher_too():
    q, k, v = tensors()
    [dq] = torch.autograd.grad(rs.ring_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(rs.UnsupportedError, match="differentiated once"):
        dq.sum().backward()
