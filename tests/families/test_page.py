"""The code of docs/how-to/family.md: a model that transformers does not know, on two ranks and on one process."""

import sys
from types import ModuleType
from typing import Any

import torch

import ringspan as rs
from ringspan.torch.model.layers import family as registry
from tests.docs.pages import DOCS, blocks
from tests.torch.models import relative, whole_gradients

BLOCKS = [
    block.text
    for block in blocks(DOCS / "how-to" / "family.md")
    if block.language == "python"
]


def page(*numbers: int, **names: Any) -> dict[str, Any]:
    """Run some of the page's blocks, as a module that classes can name."""
    module = ModuleType("mine")
    sys.modules["mine"] = module
    vars(module).update(names)
    for number in numbers:
        exec(BLOCKS[number], vars(module))
    return vars(module)


def tokens() -> torch.Tensor:
    return torch.randint(0, 97, (2, 37), generator=torch.Generator().manual_seed(1))


def build(names: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return names["MineForCausalLM"](names["MineConfig"]()).double().train()


def on_ring(mesh: Any, layout: str, checkpoint: str, lengths: list[int] | None) -> Any:
    names = page(0, 1)
    try:
        model = rs.parallelize(build(names), mesh, layout=layout, checkpoint=checkpoint)
        ids = tokens()
        batch = {"input_ids": ids, "labels": ids}
        if lengths is not None:
            batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
            batch["position_ids"] = batch["position_ids"].expand(2, -1)
        loss = model(**rs.shard_batch(batch, mesh, layout=layout)).loss
        loss.backward()
        return loss.detach(), whole_gradients(model)
    finally:
        registry._registered.clear()


def one_process(lengths: list[int] | None) -> Any:
    model, ids = build(page(0)), tokens()
    parts = ids.split(lengths or [ids.shape[1]], 1)
    logits = torch.cat([model(input_ids=part).logits for part in parts], 1)
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_the_registration_is_short():
    lines = [line for line in BLOCKS[1].splitlines() if line.strip()]
    assert len(lines) <= 40


def test_the_page_trains_as_one_process(pool):
    for layout, checkpoint, lengths in (
        ("zigzag", "attention", None),
        ("striped", "none", [5, 29, 3]),
    ):
        expected, gradients = one_process(lengths)
        for loss, found in pool.run(on_ring, 2, layout, checkpoint, lengths):
            assert relative(loss, expected) < 1e-12
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert relative(found[name], gradient) < 1e-12, name


def as_the_page_has_it(mesh: Any) -> float:
    """Run all of the page, from the model to the gradients."""
    try:
        names = page(0, 1, 2, mesh=mesh, ids=tokens())
        return float(names["loss"])
    finally:
        registry._registered.clear()


def test_all_of_the_page_runs(pool):
    one, two = pool.run(as_the_page_has_it, 2)
    assert one == two > 3


def unregistered(mesh: Any) -> None:
    rs.parallelize(build(page(0)), mesh)


def test_without_the_registration_it_is_refused_on_every_rank(pool):
    for outcome in pool.outcomes(unregistered, 2):
        assert isinstance(outcome, rs.UnsupportedError)
        assert "computes attention in its own code" in str(outcome)


def only_first(mesh: Any) -> None:
    try:
        rank = mesh["ring"].get_local_rank()
        rs.parallelize(build(page(0, *([1] if rank == 0 else []))), mesh)
    finally:
        registry._registered.clear()


def test_a_family_on_one_rank_alone_is_refused_on_both(pool):
    for outcome in pool.outcomes(only_first, 2):
        assert isinstance(outcome, rs.RingspanError), outcome
