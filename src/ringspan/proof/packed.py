"""Models whose weights bitsandbytes packs, and the plain models with the numbers that the packed weights stand for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import logging

from ringspan.core.errors import UnsupportedError
from ringspan.core.messages.extras import require
from ringspan.torch.model.weights.packed import packed_weights, settle_packed


def refuse_packing(packed: dict[str, Any], adapter: object) -> None:
    """Raise for weights that a ring does not train: packed by others than bitsandbytes, or without an adapter."""
    method = packed.get("quant_method", "bitsandbytes")
    if str(getattr(method, "value", method)) != "bitsandbytes":
        raise UnsupportedError(
            f"quantization_config: is of {method}, and a proof packs weights by bitsandbytes; use nf4, fp4 or int8"
        )
    if adapter is None:
        raise UnsupportedError(
            "quantization_config: packed weights do not train; add an adapter, such as adapter.rank=8"
        )
    require("packed weights", "bitsandbytes")


def packed_copy(model: Any, packed: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a copy of a model in a dtype, with linear layers that transformers has packed like ``packed`` says."""
    how = AutoQuantizationConfig.from_dict({"quant_method": "bitsandbytes"} | packed)
    with _without_bars():
        made = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            quantization_config=how,
            dtype=dtype,
            device_map="cpu",
        )
    # On some CPUs bitsandbytes would pack weights again in evaluation, and fails for small ones. Rings forbid it too.
    settle_packed(made)
    return made


@torch.no_grad()
def unpacked(model: Any, packed: Any) -> Any:
    """Give a plain model the numbers that the packed weights of its copy stand for, and return it."""
    from bitsandbytes.functional import dequantize_4bit

    weights = dict(model.named_parameters())
    for path, _, name, weight in packed_weights(packed):
        if hasattr(weight, "quant_state"):
            numbers = dequantize_4bit(weight.data, weight.quant_state)
        else:
            numbers = weight.data.float() * weight.SCB[:, None] / 127
        weights[f"{path}.{name}"].copy_(numbers)
    return model


@contextmanager
def _without_bars() -> Iterator[None]:
    """Silence the progress bar of transformers for a model of a second."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
