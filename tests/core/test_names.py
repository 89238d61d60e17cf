"""Names are listed once, and each of them is served."""

import pytest
import torch

import ringspan as rs
from ringspan.core import names
from ringspan.torch.engine.kernels import KERNELS


def test_each_kernel_is_named_once():
    assert sorted(names.KERNEL_NAMES) == sorted(["auto", *KERNELS])


@pytest.mark.parametrize("name", ["morse", None, 3, torch.zeros(2)])
def test_what_is_no_name_raises_with_those_there_are(name):
    with pytest.raises(
        rs.ConfigError,
        match=r"unknown code .*; choose one of exact, bfloat16, float8, int8",
    ):
        names.find_name("code", name, names.COMM_DTYPE_NAMES, rs.ConfigError)
