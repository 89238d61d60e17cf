"""Encoding of keys and values for sending, once by the owner; docs/routes.md states the errors."""

from typing import Final

import torch

from ringspan.core.codec import Codec
from ringspan.torch.engine.attention.block import Block, PackedSpec

# The dtype of each code, and its largest value if it is scaled (``core.codec``).
_CODES: Final[dict[str, tuple[torch.dtype, float | None]]] = {
    "bfloat16": (torch.bfloat16, None),
    "float8": (torch.float8_e4m3fn, 448.0),
    "int8": (torch.int8, 127.0),
}


def sent_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sends numbers of ``dtype``."""
    coded, _ = _CODES.get(codec.name, (dtype, None))
    return coded


def encode(block: Block, codec: Codec) -> Block:
    """Encode a block for sending, packed; ``float8`` and ``int8`` are scaled by each head's largest value."""
    if codec.is_exact:
        return block
    dtype, largest = _CODES[codec.name]
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
    return block._replace(k=k, v=v, buffer=None, scales=None)
