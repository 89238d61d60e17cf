"""A mask of layers that ringspan does not know, brought by a family."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan import families
from ringspan.families import Family, LayerMask
from ringspan.torch.model.layers import family as registry
from tests.torch.models import build, relative, whole_gradients

LENGTH, WINDOW, SINKS = 37, 6, 3


@dataclass(frozen=True)
class WithSinks(LayerMask):
    """The last ``window`` tokens, and the first ``sinks`` of the text (StreamingLLM)."""

    sinks: int = SINKS

    @property
    def reach(self) -> None:
        return None

    def of_document(self, length: int) -> rs.Mask:
        return rs.sliding_window(self.window or length, global_tokens=self.sinks)


FAMILY = Family(
    name="Llama with sinks",
    types=("llama",),
    layer_masks=lambda config: [WithSinks(window=WINDOW)] * config.num_hidden_layers,
)


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 97, (1, LENGTH), generator=generator)


def on_ring(mesh: Any, layout: str) -> Any:
    families.register(FAMILY, replace=True)
    try:
        model = rs.parallelize(build("llama").double(), mesh, layout=layout)
        ids = tokens()
        batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh, layout=layout)
        loss = model(**batch).loss
        loss.backward()
        return loss.detach(), whole_gradients(model)
    finally:
        registry._registered.clear()


def one_process() -> Any:
    model, ids = build("llama").double(), tokens()
    places = torch.arange(LENGTH)
    age = places[:, None] - places
    seen = (age >= 0) & ((age < WINDOW) | (places < SINKS))
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64)
    model.set_attn_implementation("sdpa")  # whose softmax is in float64
    mask = mask.masked_fill(~seen, -torch.inf)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_a_mask_of_a_family_is_that_of_its_layers(pool):
    expected, gradients = one_process()
    for layout in ("zigzag", "contiguous"):
        for loss, found in pool.run(on_ring, 3, layout):
            assert relative(loss, expected) < 1e-12
            for name, gradient in gradients.items():
                assert relative(found[name], gradient) < 1e-11, name


def asked_for_more(mesh: Any) -> None:
    families.register(FAMILY, replace=True)
    try:
        model = rs.parallelize(build("llama"), mesh)
        positions = torch.cat([torch.arange(20), torch.arange(17)])[None]
        batch = {"input_ids": tokens(), "labels": tokens(), "position_ids": positions}
        model(**rs.shard_batch(batch, mesh))
    finally:
        registry._registered.clear()


def test_what_a_mask_does_not_define_raises(pool):
    for outcome in pool.outcomes(asked_for_more, 2):
        assert isinstance(outcome, rs.UnsupportedError)
        assert "packed documents; define WithSinks.of_documents" in str(outcome)
    mask = WithSinks(window=WINDOW)
    for use in (lambda: mask.num_pairs(8), lambda: mask.over_cache(0, 8, None)):
        with pytest.raises(rs.UnsupportedError, match="define WithSinks"):
            use()


def test_masks_that_differ_have_texts_that_differ():
    """By them a compiled layer finds its own."""
    masks = [WithSinks(window=6), WithSinks(window=6, sinks=4), LayerMask(window=6)]
    assert len({mask.text for mask in masks}) == 3
