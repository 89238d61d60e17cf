"""Deferred tensors: whatever is done with them, each part is that of the same done at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringspan.torch.model.weights.deferred import (
    Deferred,
    Region,
    deferred,
    part,
    pieces,
    sources_of,
    whole,
)


class InMemory:
    """A source that says how many numbers were read."""

    place: tuple[int, int] = (0, 0)

    def __init__(self, name: str, data: Tensor) -> None:
        self.name, self.data, self.num_read = name, data, 0
        self.shape, self.dtype = tuple(data.shape), data.dtype

    def read(self, region: Region) -> Tensor:
        found = self.data[region]
        self.num_read += found.numel()
        return found


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# What transformers does with the tensors of a checkpoint, and slices with steps; each on (6, 4, 2) or what came of it.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(0, -1), "permute": lambda x: x.permute(*reversed(range(x.ndim))),
    "chunk": lambda x: x.chunk(2, 0)[-1], "split": lambda x: x.split([1, x.shape[-1] - 1], -1)[1],
    "cat": lambda x: torch.cat([x, x + 1, x.flip(0)], 0), "cat the last": lambda x: torch.cat([x * 2, x], -1),
    "stack": lambda x: torch.stack([x, -x, x], 0), "stack inside": lambda x: torch.stack([x, -x], 1),
    "select": lambda x: torch.stack([x[0], x[-1]]), "slice": lambda x: x[1:], "every other": lambda x: x[::2],
    "unbind": lambda x: torch.cat(x.unsqueeze(0).unbind(0)), "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "cast": lambda x: x.to(torch.bfloat16), "contiguous": lambda x: x.contiguous().clone().detach(),
    "reshape": lambda x: x.reshape(-1, x.shape[-1]), "square": lambda x: x @ x.transpose(-1, -2),
}  # fmt: skip


@given(st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=4), st.data())
def test_each_part_is_that_of_the_whole(names: list[str], data: Any):
    x = numbers(6, 4, 2)
    lazy: Tensor = deferred(InMemory("x", x))
    for name in names:
        if x.ndim > 4 or 0 in x.shape or (name == "split" and x.shape[-1] < 2):
            continue
        x, lazy = OPERATIONS[name](x), OPERATIONS[name](lazy)
    assert (
        isinstance(lazy, Deferred) and lazy.shape == x.shape and lazy.dtype == x.dtype
    )
    torch.testing.assert_close(whole(lazy), x, rtol=0, atol=0)
    region = tuple(
        slice(low, data.draw(st.integers(low, size)))
        for size in x.shape
        for low in [data.draw(st.integers(0, size))]
    )
    torch.testing.assert_close(part(lazy, region), x[region], rtol=0, atol=0)
    assert torch.equal(torch.cat([part(lazy, each) for each in pieces(lazy, 16)]), x)


def test_no_more_is_read_than_a_part_is_made_of():
    experts = [InMemory(f"experts.{i}", numbers(8, 4, seed=i)) for i in range(6)]
    merged = torch.stack([deferred(each).to(torch.bfloat16) for each in experts])
    found = part(merged, (slice(2, 4), slice(1, 3), slice(0, 4)))
    assert [each.num_read for each in experts] == [0, 0, 8, 8, 0, 0]
    assert torch.equal(
        found, torch.stack([each.data for each in experts])[2:4, 1:3].bfloat16()
    )
    assert {each.name for each in sources_of(merged)} == {each.name for each in experts}


def test_zeroes_are_remembered_and_other_changes_raise():
    source = InMemory("x", numbers(5, 3))
    x = deferred(source)
    x.data[2].zero_()
    expected = source.data.clone()
    expected[2] = 0
    assert torch.equal(whole(x.to(torch.float64)), expected.double())
    assert torch.equal(part(x, (slice(1, 3), slice(1, 3))), expected[1:3, 1:3])
    assert bool(source.data[2].any()), "the file is not written into"
    with pytest.raises(
        RuntimeError, match="would change a tensor that is not there yet"
    ):
        x.mul_(2)


def test_tensors_of_its_shape_can_be_filled():
    """Some models draw initial values into ``empty_like(weight)``, whether the weight is there or not."""
    x = deferred(InMemory("x", numbers(5, 3)))
    drawn = torch.empty_like(x).uniform_(1, 2).log_()
    assert drawn.shape == (5, 3) and bool((drawn >= 0).all())
    base = torch.zeros_like(x, dtype=torch.float64)
    base[:2] = torch.tensor(3.0)
    assert base.sum() == 18 and torch.equal(
        torch.full_like(x, 2), torch.full((5, 3), 2.0)
    )
    assert type(torch.ones_like(x)) is torch.Tensor


def test_two_are_compared_a_few_rows_at_a_time():
    data = numbers(7, 3)
    other = data.clone()
    other[6, 2] += 1
    assert torch.equal(
        deferred(InMemory("a", data)), deferred(InMemory("b", data.clone()))
    )
    assert not torch.equal(
        deferred(InMemory("a", data)), deferred(InMemory("b", other))
    )
    assert not torch.equal(
        deferred(InMemory("a", data)), deferred(InMemory("b", data[:6]))
    )
