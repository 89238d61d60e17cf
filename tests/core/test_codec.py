"""Encodings of what is sent: their bytes, and that torch has a code for each."""

import pytest
import torch

import ringspan as rs
from ringspan.core.codec import codec
from ringspan.core.names import COMM_DTYPE_NAMES
from ringspan.torch.engine.attention.encoding import sent_dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COMM_DTYPE_NAMES)
def test_a_code_has_the_bytes_that_are_counted_for_it(name, dtype):
    sent = sent_dtype(codec(name), dtype)
    assert sent.itemsize == codec(name).sent_itemsize(dtype.itemsize)
    assert codec(name).converts(dtype.itemsize) == (sent != dtype)


def test_an_unknown_code_raises_and_costs_nothing():
    with pytest.raises(rs.UnsupportedError, match="comm_dtype"):
        codec("float4")
