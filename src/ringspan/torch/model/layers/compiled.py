"""Decoder layers as torch.compile programs, one per kind, with checkpointing and the ring's operator inside."""

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.core.step_config import StepConfig, check_beside_compile
from ringspan.torch.engine.attention.cached import current_turn
from ringspan.torch.model.layers.family import family_of


def check_compile(decoder: PreTrainedModel, config: StepConfig) -> None:
    """Raise for ``compile`` with an unknown backend or options that it excludes."""
    backend = config.compile
    if backend is False:
        return
    if backend is not True and backend not in torch.compiler.list_backends(
        exclude_tags=()
    ):
        shown = ", ".join(torch.compiler.list_backends())
        raise ConfigError(
            f"compile={backend!r}: use True, False or a backend of torch.compile: {shown}"
        )
    # This backend records all operators of a program, also those that inductor leaves out of its graphs (``UNSAFE``).
    if backend == "cudagraphs":
        raise UnsupportedError(
            "compile='cudagraphs': a graph would repeat the messages and lengths of the batch that it recorded; use "
            "compile=True"
        )
    check_beside_compile(config)
    name = type(decoder).__name__
    if family_of(decoder.config).scales_queries(decoder.config):
        raise UnsupportedError(
            f"compile={backend!r}: {name} scales queries by their positions; use compile=False"
        )


def compile_layers(
    decoder: nn.Module,
    layers: Sequence[nn.Module],
    kinds: Sequence[LayerMask],
    backend: bool | str,
) -> None:
    """Have each layer compiled at its first run, except over a cache; FSDP's hooks stay outside of the program."""
    for module in decoder.modules():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int) and number < len(kinds):
            module.ring_kind = kinds[number]  # pyright: ignore[reportArgumentType]
    for layer in layers:
        # The compiled program checkpoints itself, because releases of transformers differ in whether ``forward`` does.
        is_checkpointed: Any = bool(getattr(layer, "gradient_checkpointing", False))
        layer.ring_is_checkpointed = is_checkpointed
        layer.gradient_checkpointing = False  # pyright: ignore[reportArgumentType]
        layer.forward = _either(layer, "inductor" if backend is True else str(backend))


def _checkpointed(layer: Any, *args: object, **kwargs: object) -> object:
    """Run a layer, checkpointed in training; as an argument, layers of one type share a compiled program."""
    plain = type(layer).forward
    if layer.ring_is_checkpointed and layer.training:
        return layer._gradient_checkpointing_func(
            partial(plain, layer, **kwargs), *args
        )
    return plain(layer, *args, **kwargs)


def _either(layer: nn.Module, backend: str) -> Callable[..., Any]:
    """Return a layer's forward: the compiled program, or the layer's own code over a cache.

    Packed batches run uncompiled until the layer has been seen to pass their documents on to attention.
    """
    program: Callable[..., Any] = torch.compile(
        MethodType(_checkpointed, layer), backend=backend
    )
    # True once the layer has passed a packed batch's documents on to attention. A compiled program cannot record it.
    hands_on = False

    def forward(*args: object, **kwargs: object) -> object:
        nonlocal hands_on
        if current_turn() is not None:
            return type(layer).forward(layer, *args, **kwargs)
        packed: Any = kwargs.get("ring_packed")
        if packed is None:
            return program(*args, **kwargs)
        if hands_on:
            packed.is_seen = True
            return program(*args, **kwargs)
        before, packed.is_seen = packed.is_seen, False
        result = _checkpointed(layer, *args, **kwargs)
        hands_on = packed.is_seen
        packed.is_seen = before or hands_on
        return result

    return forward
