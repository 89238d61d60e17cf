"""Exact attention over sequences that no single device can hold: Ring Attention for PyTorch, Hugging Face and JAX.

Importing ringspan imports nothing but the standard library; a name loads what it needs when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringspan.core.errors import (
        ConfigError,
        LayoutError,
        MaskError,
        PeerMismatch,
        RingspanError,
        UnsupportedError,
    )
    from ringspan.core.geometry.balanced import balanced
    from ringspan.core.geometry.layout import CustomLayout, Layout, Span
    from ringspan.core.geometry.mask import Mask, causal, chunked, documents, frames, full, prefix_lm, sliding_window
    from ringspan.core.geometry.tree import tree
    from ringspan.torch.attention.op import ring_attention
    from ringspan.torch.data.batch import shard_batch
    from ringspan.torch.data.cross_entropy import blockwise_cross_entropy
    from ringspan.torch.data.loader import loader, sampler
    from ringspan.torch.data.sharding import shard, unshard
    from ringspan.torch.from_pretrained import from_pretrained
    from ringspan.torch.memory.host_optimizer import HostAdamW
    from ringspan.torch.model.tasks.hidden_states import global_sum, shard_features
    from ringspan.torch.model.tasks.logprobs import token_logprobs
    from ringspan.torch.parallelize import parallelize
    from ringspan.torch.runtime.foreign_mesh import map_mesh
    from ringspan.torch.runtime.mesh import init_mesh

__version__ = "0.1.0"

# Where each public name is defined. Type checkers read the imports above; a test compares the two and __all__.
_MODULES = {
    "ConfigError": "ringspan.core.errors",
    "CustomLayout": "ringspan.core.geometry.layout",
    "HostAdamW": "ringspan.torch.memory.host_optimizer",
    "Layout": "ringspan.core.geometry.layout",
    "LayoutError": "ringspan.core.errors",
    "Mask": "ringspan.core.geometry.mask",
    "MaskError": "ringspan.core.errors",
    "PeerMismatch": "ringspan.core.errors",
    "RingspanError": "ringspan.core.errors",
    "Span": "ringspan.core.geometry.layout",
    "UnsupportedError": "ringspan.core.errors",
    "balanced": "ringspan.core.geometry.balanced",
    "blockwise_cross_entropy": "ringspan.torch.data.cross_entropy",
    "causal": "ringspan.core.geometry.mask",
    "chunked": "ringspan.core.geometry.mask",
    "documents": "ringspan.core.geometry.mask",
    "frames": "ringspan.core.geometry.mask",
    "from_pretrained": "ringspan.torch.from_pretrained",
    "full": "ringspan.core.geometry.mask",
    "global_sum": "ringspan.torch.model.tasks.hidden_states",
    "init_mesh": "ringspan.torch.runtime.mesh",
    "loader": "ringspan.torch.data.loader",
    "map_mesh": "ringspan.torch.runtime.foreign_mesh",
    "parallelize": "ringspan.torch.parallelize",
    "prefix_lm": "ringspan.core.geometry.mask",
    "ring_attention": "ringspan.torch.attention.op",
    "sampler": "ringspan.torch.data.loader",
    "shard": "ringspan.torch.data.sharding",
    "shard_batch": "ringspan.torch.data.batch",
    "shard_features": "ringspan.torch.model.tasks.hidden_states",
    "sliding_window": "ringspan.core.geometry.mask",
    "token_logprobs": "ringspan.torch.model.tasks.logprobs",
    "tree": "ringspan.core.geometry.tree",
    "unshard": "ringspan.torch.data.sharding",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ringspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names for ``dir`` and completion: the loaded ones, and those that load on first use."""
    return sorted({*globals(), *__all__})


__all__ = [
    "ConfigError",
    "CustomLayout",
    "HostAdamW",
    "Layout",
    "LayoutError",
    "Mask",
    "MaskError",
    "PeerMismatch",
    "RingspanError",
    "Span",
    "UnsupportedError",
    "balanced",
    "blockwise_cross_entropy",
    "causal",
    "chunked",
    "documents",
    "frames",
    "from_pretrained",
    "full",
    "global_sum",
    "init_mesh",
    "loader",
    "map_mesh",
    "parallelize",
    "prefix_lm",
    "ring_attention",
    "sampler",
    "shard",
    "shard_batch",
    "shard_features",
    "sliding_window",
    "token_logprobs",
    "tree",
    "unshard",
]
