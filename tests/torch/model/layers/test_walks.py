"""Walks over a model's modules, which are quicker than torch's and find the same."""

from torch import nn

from ringspan.torch.model.layers.modules import modules_in, trained_in
from tests.torch.models import build


def test_modules_and_parameters_are_those_of_torch():
    model = build("llama")
    model.model.layers[0].mlp.requires_grad_(False)
    assert modules_in(model) == [*model.modules()]
    assert trained_in(model) == [p for p in model.parameters() if p.requires_grad]


def test_what_is_shared_or_missing_is_met():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.Identity()))
    model.register_module("nothing", None)
    assert {*modules_in(model)} == {*model.modules()}
    assert trained_in(model) == [*model.parameters()]
    assert trained_in(nn.Identity()) == []
