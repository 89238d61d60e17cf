"""Switches of modules, noted in a pass: like inputs and weights, they decide what a module computes.

A recomputation in backward reads them again, when another adapter may be active or the model in evaluation mode.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

_NAMES: Final = (
    "training",
    "p",
    "rotary_length",
    "_active_adapter",
    "_disable_adapters",
    "scaling",
)
"""Training mode, a dropout rate, the length of rotary tables; PEFT's active adapters, their switch and scale."""
_ABSENT: Final = object()
_FIXED: Final = frozenset((bool, int, float, str, type(None), type(_ABSENT)))
"""Types of values that do not change in place."""


class Switches:
    """Switches of a module and its submodules, which are listed once: adapters are not added on a ring."""

    def __init__(self, module: nn.Module) -> None:
        parts = [*module.modules()]
        self._attributes = [
            (vars(part), name)
            for part in parts
            for name in _NAMES
            if name in vars(part)
        ]
        self._parameters = [
            (part._parameters, name)
            for part in parts
            for name, each in part._parameters.items()
            if each is not None
        ]

    def noted(self) -> Callable[[], Any]:
        """Return a factory of contexts that restore all switches as they are now."""
        values, trained = self._values(), self._trained()

        @contextmanager
        def as_then() -> Iterator[None]:
            """Set the switches and ``requires_grad`` to their noted values, and back to the present ones at the end."""
            before, others = self._values(), self._trained()
            if before == values and others == trained:
                yield
                return
            own = _looked_up(self._attributes, _ABSENT)
            held = _looked_up(self._parameters)
            self._set(values)
            _require(held, trained)
            try:
                yield
            finally:
                self._set(own)
                # FSDP may have swapped a sharded parameter for its whole copy meanwhile; both must be reset.
                _require(held, others)
                _require(_looked_up(self._parameters), others)

        return as_then

    def _values(self) -> list[Any]:
        values = _looked_up(self._attributes, _ABSENT)
        return [value if type(value) in _FIXED else _copied(value) for value in values]

    def _trained(self) -> list[bool]:
        held = _looked_up(self._parameters)
        return [each is not None and each.requires_grad for each in held]

    def _set(self, values: list[Any]) -> None:
        for (attributes, name), value in zip(self._attributes, values, strict=True):
            if value is not _ABSENT:
                attributes[name] = value


def _looked_up(
    places: list[tuple[dict[str, Any], str]], absent: object = None
) -> list[Any]:
    """Return what dicts have under names; ``absent`` for a name that is gone, as of packed weights between passes."""
    # Without a call for each: every layer reads dozens, in forward and in backward.
    try:
        return [each[name] for each, name in places]
    except KeyError:
        return [each.get(name, absent) for each, name in places]


def _require(parameters: list[nn.Parameter | None], trained: list[bool]) -> None:
    for parameter, requires in zip(parameters, trained, strict=True):
        if parameter is not None and parameter.requires_grad != requires:
            parameter.requires_grad_(requires)


def _copied(value: Any) -> Any:
    """Return a copy that a later change in place does not reach; ``_ABSENT`` if the value is not a switch."""
    if isinstance(value, list | dict):
        return value.copy()
    return value if isinstance(value, int | float | str) else _ABSENT
