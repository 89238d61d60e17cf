"""Triton's interpreter, which computes with numpy, and keeps its state in globals."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
from triton.runtime import interpreter

_TURN = threading.Lock()

# It would find out for every sum of integers whether it overflows, a third of its time, and then not say so.
_builder = interpreter.interpreter_builder
assert not _builder.options.debug
_builder.options = replace(_builder.options, sanitize_overflow=False)


def interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    """For what launches programs there: by one thread at a time (JAX has one for each device), and numpy does not warn
    where a mask hides what it computes.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        with _TURN, np.errstate(all="ignore"):
            return function(*args)

    return call
