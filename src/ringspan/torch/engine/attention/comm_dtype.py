"""Encoding of keys and values for sending, once by the owner; docs/routes.md states the errors."""

from dataclasses import replace
from typing import Final

import torch

from ringspan.core.codec import codec
from ringspan.core.errors import UnsupportedError
from ringspan.core.names import COMM_DTYPE_NAMES, GRADIENT_COMM_DTYPE_NAMES, find_name
from ringspan.torch.engine.attention.block import Block, PackedSpec

# The dtype of each code, and its largest value if it is scaled (``core.codec``).
_CODES: Final[dict[str, tuple[torch.dtype, float | None]]] = {
    "bfloat16": (torch.bfloat16, None),
    "float8": (torch.float8_e4m3fn, 448.0),
    "int8": (torch.int8, 127.0),
}


def check_comm_dtype(comm_dtype: str, gradient_comm_dtype: str) -> None:
    find_name("comm_dtype", comm_dtype, COMM_DTYPE_NAMES, UnsupportedError)
    find_name(
        "gradient_comm_dtype",
        gradient_comm_dtype,
        GRADIENT_COMM_DTYPE_NAMES,
        UnsupportedError,
    )


def sent_as(comm_dtype: str, dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    """Return the dtype that sends numbers of ``dtype``, and whether factors come with them."""
    sent = codec(comm_dtype)
    coded, _ = _CODES.get(comm_dtype, (dtype, None))
    return coded, sent.is_scaled


def encode(block: Block, comm_dtype: str) -> Block:
    """Encode a block for sending, packed; ``float8`` and ``int8`` are scaled by each head's largest value."""
    if comm_dtype == "exact":
        return block
    dtype, largest = _CODES[comm_dtype]
    if largest is None:
        return block.to(dtype)
    coded = PackedSpec.of(block.ranges, block.k, block.v, dtype, scaled=True).empty()
    assert coded.scales is not None
    for x, code, scale in zip(
        (block.k, block.v), (coded.k, coded.v), coded.scales, strict=True
    ):
        if not x.numel():
            continue  # a rank that holds no tokens, and sends none
        x = x.float()
        scale.copy_(
            x.abs()
            .amax((2, 3), keepdim=True)
            .clamp_(min=torch.finfo(torch.float32).tiny)
            / largest
        )
        x = x / scale
        code.copy_(x.round_() if dtype == torch.int8 else x)
    return coded


def decode(block: Block, dtype: torch.dtype) -> Block:
    if block.scales is None:
        return block.to(dtype)
    k, v = (
        (code.to(torch.float32) * scale).to(dtype)
        for code, scale in zip((block.k, block.v), block.scales, strict=True)
    )
    return replace(block, k=k, v=v, buffer=None, scales=None)
