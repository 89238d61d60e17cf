"""Checks of numbers that a user gave."""

from math import isfinite
from numbers import Integral, Real
from operator import index
from typing import Any, Final, cast

from ringspan.core.errors import ConfigError, RingspanError

# Larger than any position, and small enough that sums of a few fit an int64.
LARGEST_INTEGER: Final = 1 << 60


def integer(
    value: object, name: str, error: type[RingspanError], *, at_least: int | None = None
) -> int:
    """Convert any library's integer, or integral float, to int; raise the given error otherwise."""
    if type(value) is not int:
        value = _whole(value, name, error)
    if at_least is not None and value < at_least:
        raise error(f"{name} must be at least {at_least}, got {value}")
    if value > LARGEST_INTEGER:
        raise error(f"{name} must be at most 2**60, got {value}")
    return value


def _whole(value: object, name: str, error: type[RingspanError]) -> int:
    is_bool = (
        isinstance(value, bool)
        or str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool"
    )
    if not is_bool:
        if (
            isinstance(value, Real)
            and not isinstance(value, Integral)
            and float(value).is_integer()
        ):
            return int(float(value))
        try:
            return index(cast(Any, value))
        # Libraries raise these for an array that is not an integer.
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ):
            pass
    raise error(f"{name} must be an integer, got {described(value)}")


def numbers_in(
    option: str, text: str, example: str, most: int = 1024
) -> tuple[int, ...]:
    """Read whole numbers from 1 to ``most``, separated by commas; ConfigError for other text."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= most for word in words):
        raise ConfigError(
            f"{option} {text!r}: write numbers from 1 to {most:,} with commas, such as {example}"
        )
    return tuple(map(int, words))


def real(value: object, name: str, error: type[RingspanError]) -> float:
    """Convert to a finite float; raise the given error otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{name} must be a plain number, got {described(value)}")
    if not isfinite(value):
        raise error(f"{name} must be finite, got {value}")
    return float(value)


def is_a(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind)


def described(value: object) -> str:
    """Describe an unexpected value: its type, and its repr if short."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return f"the {'class' if isinstance(value, type) else 'function'} {getattr(value, '__name__', '')}"
    if shape := tuple[Any, ...](getattr(value, "shape", ())):
        return f"a {type(value).__name__} of shape {shape}"
    text = repr(value)
    return (
        f"{text} ({type(value).__name__})"
        if len(text) <= 40
        else f"a {type(value).__name__}"
    )


def check_whole(
    name: str, value: object, least: int = 1, *, otherwise: str = ""
) -> None:
    """Raise ConfigError unless an option is an integer >= ``least``; ``otherwise`` names other values."""
    # Even 2.0 raises: the option would stay a float, which range() does not take.
    try:
        if isinstance(value, float):
            raise ConfigError(f"{name} must be an integer, got {described(value)}")
        integer(value, name, ConfigError, at_least=least)
    except ConfigError as error:
        raise ConfigError(f"{error}{otherwise}") from None


def check_real(
    name: str,
    value: object,
    least: float,
    below: float = float("inf"),
    *,
    above: bool = False,
) -> None:
    """Raise ConfigError unless a number is in [least, below), or in (least, below) with ``above``."""
    number = real(value, name, ConfigError)
    if not (least < number if above else least <= number) or not number < below:
        bounds = f"{'above' if above else 'at least'} {least}" + (
            f" and below {below}" if below < float("inf") else ""
        )
        raise ConfigError(f"{name} must be {bounds}, got {value!r}")
