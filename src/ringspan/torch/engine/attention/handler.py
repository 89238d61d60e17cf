"""Interception of the operator's forward pass, so that checkpointing keeps results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar, cast

from torch import Tensor

Results = tuple[Tensor, ...]
"""out and lse of a forward pass, then what an index chose, if there is one."""
_Results = TypeVar("_Results", bound=Results)
Handler = Callable[[Callable[[], Results]], Results]

_current: Final[ContextVar[Handler | None]] = ContextVar("handler", default=None)


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    before = _current.set(handler)
    try:
        yield
    finally:
        _current.reset(before)


def name_of(compute: Any) -> str:
    """Return a name of what computes results, the same for each call of an operator."""
    # A ``functools.partial`` keeps its function in ``func``.
    function = getattr(compute, "func", compute)
    return f"{function.__module__}.{function.__qualname__}"


def handled(compute: Callable[[], _Results]) -> _Results:
    handler = _current.get()
    return compute() if handler is None else cast("_Results", handler(compute))
