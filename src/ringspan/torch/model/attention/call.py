"""One call of a layer's attention, as a mechanism may take it over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import LayoutName
from ringspan.torch.engine.attention.cached import Turn


class Rows(NamedTuple):
    """Sequences of a batch that share a mask and a layout."""

    part: slice
    mask: Mask
    layout: LayoutName | Layout


@dataclass(frozen=True)
class AttentionCall:
    """Queries, keys and values (B, H, T, D) of a layer's local tokens, and the other arguments of its module."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    """The ``attention_mask`` that the module passes; only None goes to the ring."""
    further: dict[str, Any]
    """Other keyword arguments of the module."""
    scale: float | None
    sinks: Tensor | None
    ring: dist.ProcessGroup
    turn: Turn | None
    """The tokens over a cache; None in a pass without one."""
    rows_under: Callable[[LayerMask], list[Rows]]
    """Maps a layer's mask to the rows of the batch, each under it and its documents."""
    kind: LayerMask | None = None
    """The layer's mask, if it is not its config's."""
    compute: Callable[[], Tensor] | None = None
    """Computes attention (B, T, H, v) in place of the ring."""
