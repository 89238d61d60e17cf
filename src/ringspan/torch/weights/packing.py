"""Weights packed by bitsandbytes as they are read: quantised one at a time, on each rank, and cut into shards."""

from typing import Any

import torch
from torch import nn

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.torch.weights.packed import EightBits, FourBits, split_weight


def pack_unread(model: Any, config: Any) -> None:
    """Give a model with deferred weights bitsandbytes' modules; UnsupportedError, or ConfigError without it."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    if not isinstance(config, BitsAndBytesConfig):
        raise UnsupportedError(
            f"quantization_config={type(config).__name__} does not pack weights as they are read; use "
            "BitsAndBytesConfig, or from_pretrained of transformers and parallelize"
        )
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    try:
        quantizer.validate_environment(device_map={"": "cpu"})
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"quantization_config: {error}; pip install bitsandbytes, or leave it out") from error
    plain = dict(model.named_modules())
    quantizer.preprocess_model(model, device_map={"": "cpu"})
    for path, module in [*model.named_modules()]:
        if module is not plain.get(path) and isinstance(module, nn.Linear):
            _pack(module, plain[path])
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def _pack(module: Any, plain: Any) -> None:
    """Pack one projection as bitsandbytes does when it moves to a device."""
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    module.bias, weight = plain.bias, module.weight
    numbers = plain.weight.detach() if isinstance(plain, nn.Linear) else plain.weight.detach().t().contiguous()
    if hasattr(module, "state"):
        packed, scales, _ = int8_vectorwise_quant(numbers.to(torch.float16))
        split_weight(module, "weight", EightBits(type(weight)), {"packed": packed, "scales": scales})
        return
    packed, state = quantize_4bit(
        numbers,
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    packing = FourBits(type(weight), state, weight.quant_storage)
    split_weight(module, "weight", packing, packing.parts_of(packed, state))
