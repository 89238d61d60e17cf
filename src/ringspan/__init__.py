"""Exact attention over sequences that no single device can hold: Ring Attention for PyTorch, Hugging Face and JAX.

Importing ringspan imports nothing but the standard library; a name loads what it needs when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
    from ringspan.core.geometry.mask import (
        Mask,
        causal,
        chunked,
        documents,
        frames,
        full,
        prefix_lm,
        sliding_window,
    )
    from ringspan.core.geometry.tree import tree
    from ringspan.proof.run import prove
    from ringspan.torch.data.batch_layout import shard, unshard
    from ringspan.torch.data.cross_entropy import blockwise_cross_entropy
    from ringspan.torch.data.loader import loader, sampler
    from ringspan.torch.engine.attention.op import ring_attention
    from ringspan.torch.from_pretrained import from_pretrained
    from ringspan.torch.mechanisms.routes.recording import token_routes
    from ringspan.torch.mechanisms.trees.batch import share_prefixes
    from ringspan.torch.model.memory.adamw import HostAdamW
    from ringspan.torch.model.named_weights import named_weights
    from ringspan.torch.model.tasks.causal_lm import token_logprobs
    from ringspan.torch.model.tasks.hidden_states import global_sum, shard_features
    from ringspan.torch.parallelize import parallelize
    from ringspan.torch.runtime.foreign_mesh import map_mesh
    from ringspan.torch.runtime.mesh import init_mesh
    from ringspan.torch.shard_batch import shard_batch

__version__ = "0.1.0"

# Names by the module that defines them. Type checkers read the imports above; a test compares the two and __all__.
_NAMES = {
    "core.errors": (
        "ConfigError",
        "LayoutError",
        "MaskError",
        "PeerMismatch",
        "RingspanError",
        "UnsupportedError",
    ),
    "core.geometry.balanced": ("balanced",),
    "core.geometry.layout": ("CustomLayout", "Layout", "Span"),
    "core.geometry.mask": (
        "Mask",
        "causal",
        "chunked",
        "documents",
        "frames",
        "full",
        "prefix_lm",
        "sliding_window",
    ),
    "core.geometry.tree": ("tree",),
    "proof.run": ("prove",),
    "torch.engine.attention.op": ("ring_attention",),
    "torch.data.cross_entropy": ("blockwise_cross_entropy",),
    "torch.data.loader": ("loader", "sampler"),
    "torch.data.batch_layout": ("shard", "unshard"),
    "torch.from_pretrained": ("from_pretrained",),
    "torch.model.memory.adamw": ("HostAdamW",),
    "torch.mechanisms.trees.batch": ("share_prefixes",),
    "torch.mechanisms.routes.recording": ("token_routes",),
    "torch.model.named_weights": ("named_weights",),
    "torch.model.tasks.hidden_states": ("global_sum", "shard_features"),
    "torch.model.tasks.causal_lm": ("token_logprobs",),
    "torch.parallelize": ("parallelize",),
    "torch.runtime.foreign_mesh": ("map_mesh",),
    "torch.runtime.mesh": ("init_mesh",),
    "torch.shard_batch": ("shard_batch",),
}
_MODULES = {
    name: f"ringspan.{module}" for module, names in _NAMES.items() for name in names
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ringspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names for ``dir`` and completion: the loaded ones, and those that load on first use."""
    return sorted({*globals(), *__all__})


__all__ = [
    "ConfigError", "CustomLayout", "HostAdamW", "Layout", "LayoutError", "Mask", "MaskError", "PeerMismatch",
    "RingspanError", "Span", "UnsupportedError", "balanced", "blockwise_cross_entropy", "causal", "chunked",
    "documents", "frames", "from_pretrained", "full", "global_sum", "init_mesh", "loader", "map_mesh", "named_weights",
    "parallelize", "prefix_lm", "prove", "ring_attention", "sampler", "shard", "shard_batch", "shard_features",
    "share_prefixes", "sliding_window", "token_logprobs", "token_routes", "tree", "unshard",
]  # fmt: skip
