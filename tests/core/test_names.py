"""Names are listed once, and each of them is served."""

import pytest
import torch

import ringspan as rs
from ringspan.core import names
from ringspan.core.schedule.choice import check_segments
from ringspan.core.schedule.route import Route
from ringspan.torch.attention.block import Block
from ringspan.torch.attention.comm_dtype import encode
from ringspan.torch.kernels import KERNELS


def test_each_kernel_is_named_once():
    assert sorted(names.KERNEL_NAMES) == sorted(["auto", *KERNELS])


@pytest.mark.parametrize("name", names.LAYOUT_NAMES)
def test_each_layout_is_one(name):
    assert sorted(p for rank in range(2) for p in rs.Layout(name, 8, 2).positions(rank)) == list(range(8))


@pytest.mark.parametrize("name", names.ROUTE_NAMES)
def test_each_route_can_be_read(name):
    assert next(Route.parse(f"{name}:2" if name == "double-ring" else name, 4).itineraries(4))


@pytest.mark.parametrize("name", names.CHECKPOINT_NAMES)
def test_each_policy_is_known(name):
    assert names.checkpoint_name(name) == name
    check_segments(name, 1)


@pytest.mark.parametrize("name", names.COMM_DTYPE_NAMES)
def test_each_communication_dtype_has_a_code(name):
    x = torch.randn(1, 1, 8, 4)
    coded = encode(Block.whole(x, x), name)
    assert coded.k.dtype.itemsize == {"exact": 4, "bfloat16": 2}.get(name, 1)


@pytest.mark.parametrize("name", ["morse", None, 3, torch.zeros(2)])
def test_what_is_no_name_raises_with_those_there_are(name):
    with pytest.raises(rs.ConfigError, match=r"unknown code .*; choose one of exact, bfloat16, float8, int8"):
        names.find_name("code", name, names.COMM_DTYPE_NAMES, rs.ConfigError)
