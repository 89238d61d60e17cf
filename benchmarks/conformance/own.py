"""This library's attention, as the suite calls one: an example of an adapter."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask, causal, documents, full, sliding_window
from ringspan.torch.engine.attention.op import ring_attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, documents: Sequence[int] | None, length: int,
    group: dist.ProcessGroup | None,
) -> Tensor:  # fmt: skip
    """``ring_attention`` on a zigzag layout with the given mask, for ``--layout zigzag``."""
    layout = Layout("zigzag", length, dist.get_world_size(group))
    return ring_attention(
        q, k, v, mask=mask_of(causal, window, documents), layout=layout, group=group
    )


def mask_of(is_causal: bool, window: int | None, lengths: Sequence[int] | None) -> Mask:
    if lengths:
        return documents(lengths, window=window, is_causal=is_causal)
    if window:
        return sliding_window(window)
    return causal() if is_causal else full()
