"""Activation checkpointing: what a layer keeps for its backward pass and what it computes again."""

from functools import partial
from typing import Any, Final, Literal, cast, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import ConfigError
from ringspan.torch import attention as attention  # registers the ring's operator
from ringspan.torch.modules import mix_in
from ringspan.torch.offload import OffloadName, Store, offload_name

CheckpointName = Literal["none", "full", "attention"]
CHECKPOINT_NAMES: Final[tuple[str, ...]] = get_args(CheckpointName)


def checkpoint_name(name: str) -> CheckpointName:
    """``name`` as the name of a policy.

    Raises:
        ConfigError: there is no such policy.
    """
    if name not in CHECKPOINT_NAMES:
        raise ConfigError(f"unknown checkpoint policy {name!r}; choose one of {', '.join(CHECKPOINT_NAMES)}")
    return cast(CheckpointName, name)


def kept_bytes(
    config: PreTrainedConfig,
    policy: CheckpointName,
    dtype: torch.dtype,
    *,
    tp: int = 1,
    feedforward_in_chunks: bool = False,
) -> int:
    """Bytes that one layer keeps of one token for its backward pass.

    With hidden size C and s bytes an entry; H query heads and G key/value heads of size D and intermediate size F, of
    which each of ``tp`` ranks has its share:

        full        s C                                   the layer's input
        attention   s C + s H D + 4 H                     and the ring's result and log-sum-exp
        none        2 (4 (C + 1) + 2 s C)                 two norms, which compute in float32
                    + 2 s (H + G) D + 4 H                 queries, keys, values, result and log-sum-exp
                    + 4 s F                               the gated feed-forward, unless it runs in chunks

    ``none`` is that of layers in the shape of Llama's; norms on queries and keys or behind a sublayer keep more.
    """
    s, hidden, heads = dtype.itemsize, config.hidden_size, config.num_attention_heads
    groups = (getattr(config, "num_key_value_heads", None) or heads) // tp
    size = getattr(config, "head_dim", None) or hidden // heads
    heads //= tp
    if policy == "full":
        return s * hidden
    if policy == "attention":
        return s * hidden + s * heads * size + 4 * heads
    intermediate = (getattr(config, "intermediate_size", None) or 4 * hidden) // tp
    between = 0 if feedforward_in_chunks else 4 * s * intermediate
    return 2 * (4 * (hidden + 1) + 2 * s * hidden) + 2 * s * (heads + groups) * size + 4 * heads + between


def choose_checkpoint(
    config: PreTrainedConfig,
    tokens: int,
    budget_bytes: int,
    dtype: torch.dtype,
    *,
    tp: int = 1,
    feedforward_in_chunks: bool = False,
) -> CheckpointName:
    """The policy that computes least again and keeps at most so many bytes of ``tokens`` local tokens in all layers.

    Raises:
        ConfigError: not even ``full`` fits; the message says what it needs.
    """
    needed = 0
    for policy in ("none", "attention", "full"):
        bytes_ = kept_bytes(config, policy, dtype, tp=tp, feedforward_in_chunks=feedforward_in_chunks)
        needed = bytes_ * tokens * config.num_hidden_layers
        if needed <= budget_bytes:
            return policy
    raise ConfigError(
        f"activations of {tokens:,} tokens a rank take {needed:,} bytes with checkpoint='full', the budget is "
        f"{budget_bytes:,}; use a larger ring, or offload='activations'"
    )


def checkpoint_layers(model: PreTrainedModel, policy: CheckpointName, offload: OffloadName = "none") -> None:
    """Checkpoint every decoder layer of a Hugging Face model.

    ``none`` keeps everything; ``full`` keeps a layer's input and computes the layer again; ``attention`` also keeps the
    ring's result and log-sum-exp, so that the ring forward (its FLOPs and all of its communication) never runs again.
    With ``offload="activations"`` what is kept waits in host memory (CUDA) or in memory-mapped files (CPU).

    Raises:
        ConfigError: an unknown policy, a model without checkpointing, or nothing to offload.
    """
    if offload_name(offload) != "none" and checkpoint_name(policy) == "none":
        raise ConfigError(f"offload={offload!r} moves what checkpointing keeps; use checkpoint='attention' or 'full'")
    if checkpoint_name(policy) == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"{type(model).__name__} has no activation checkpointing; use checkpoint='none'")
    store = Store() if offload == "activations" else None
    options: dict[str, Any] = {"use_reentrant": False}
    if policy == "attention" and store is None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    elif policy == "attention" and store is not None:
        options["context_fn"] = partial(_keep_attention_in, store)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name before transformers 5.2x
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if store is not None:
        mix_in(model.base_model, _Stored, activation_store=store)


class _Stored:
    """What offloading adds to a decoder's class. Inside of a checkpointed layer nothing is kept, only its inputs."""

    activation_store: Store

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.activation_store.hooks():
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


_RING: Final = torch.ops.ringspan.ring_attention.default


def _keep_attention(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator == _RING else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_attention_in(store: Store) -> tuple["_Keep", "_Replay"]:
    """Contexts for a layer's forward and for its recomputation: the ring's results go to the store and come back."""
    kept: list[tuple[Any, ...]] = []
    return _Keep(store, kept), _Replay(store, kept)


class _Keep(TorchDispatchMode):
    def __init__(self, store: Store, kept: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._store, self._kept = store, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _RING:
            self._kept.append(tuple(self._store.put(x.detach()) for x in result))
        return result


class _Replay(TorchDispatchMode):
    def __init__(self, store: Store, kept: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._store, self._kept = store, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != _RING:
            return func(*args, **(kwargs or {}))
        if not self._kept:
            raise RuntimeError("an offloaded layer can be differentiated once; compute the loss again")
        return tuple(self._store.get(x) for x in self._kept.pop(0))
