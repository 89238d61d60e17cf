"""jax-triton without a GPU: Triton's interpreter computes what it would launch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jax
import numpy as np
import torch

from ringspan.gpu.support import is_installed
from tests.torch.interpreter import interpreted

launched: list[str] = []
"""The programs that ``triton_call`` was traced with."""


def triton_call(
    *args: Any, kernel: Any, out_shape: list[Any], grid: Any, **options: Any
) -> list[jax.Array]:
    """As jax-triton 0.3: numbers are static, and the results' pointers come behind all arguments."""
    numbers = {
        n: x if isinstance(x, int) else float(x)
        for n, x in enumerate(args)
        if isinstance(x, (int, np.float32))
    }
    launched.append(kernel.fn.__name__)

    @interpreted
    def run(*arrays: Any) -> list[np.ndarray]:
        given = iter(arrays)
        inputs = [
            numbers[n] if n in numbers else torch.tensor(np.asarray(next(given)))
            for n in range(len(args))
        ]
        outputs = [torch.full(x.shape, torch.nan) for x in out_shape]
        kernel[grid](*inputs, *outputs, **options)
        return [x.numpy() for x in outputs]

    return jax.pure_callback(
        run, out_shape, *(x for n, x in enumerate(args) if n not in numbers)
    )


@contextmanager
def jax_triton() -> Iterator[None]:
    module, name = ModuleType("jax_triton"), "jax_triton"
    module.__dict__.update(triton_call=triton_call, __spec__=ModuleSpec(name, None))
    real = sys.modules.pop(name, None)
    # not by patch.dict, which forgets what is imported meanwhile: MLIR registers only once
    sys.modules[name] = module
    is_installed.cache_clear()
    try:
        yield
    finally:
        del sys.modules[name]
        if real:
            sys.modules[name] = real
        is_installed.cache_clear()
