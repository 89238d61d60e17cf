"""Exact attention over sequences that no single device can hold: Ring Attention for PyTorch, Hugging Face and JAX.

Importing ringspan imports neither torch nor jax; a name that needs one loads it when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringspan.core.errors import (
    ConfigError,
    LayoutError,
    MaskError,
    PeerMismatch,
    RingspanError,
    UnsupportedError,
)
from ringspan.core.layout import Layout, Span
from ringspan.core.mask import Mask, causal, chunked, documents, full, prefix_lm, sliding_window

if TYPE_CHECKING:
    from ringspan.torch.attention import ring_attention
    from ringspan.torch.batch import shard, shard_batch, unshard
    from ringspan.torch.loader import loader, sampler
    from ringspan.torch.loss import blockwise_cross_entropy
    from ringspan.torch.mesh import init_mesh
    from ringspan.torch.models import parallelize

__version__ = "0.1.0"

_LAZY = {
    "blockwise_cross_entropy": "ringspan.torch.loss",
    "init_mesh": "ringspan.torch.mesh",
    "loader": "ringspan.torch.loader",
    "parallelize": "ringspan.torch.models",
    "ring_attention": "ringspan.torch.attention",
    "sampler": "ringspan.torch.loader",
    "shard": "ringspan.torch.batch",
    "shard_batch": "ringspan.torch.batch",
    "unshard": "ringspan.torch.batch",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ringspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    """For ``dir`` and completion: what is loaded, and what will be when it is first used."""
    return sorted({*globals(), *__all__})


__all__ = [
    "ConfigError",
    "Layout",
    "LayoutError",
    "Mask",
    "MaskError",
    "PeerMismatch",
    "RingspanError",
    "Span",
    "UnsupportedError",
    "blockwise_cross_entropy",
    "causal",
    "chunked",
    "documents",
    "full",
    "init_mesh",
    "loader",
    "parallelize",
    "prefix_lm",
    "ring_attention",
    "sampler",
    "shard",
    "shard_batch",
    "sliding_window",
    "unshard",
]
