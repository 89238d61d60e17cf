"""Numbers that a user gave: what they must be, said in one line."""

from typing import Any

from ringspan.core.errors import ConfigError


def check_whole(name: str, value: Any, least: int = 1, *, otherwise: str = "") -> None:
    """Raise a ConfigError unless ``value`` is a whole number of at least ``least``; ``otherwise`` says what else may be
    given.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}{otherwise}")


def check_real(name: str, value: Any, least: float, below: float = float("inf"), *, above: bool = False) -> None:
    """Raise a ConfigError unless ``value`` is a number in [least, below), or in (least, below) where it must be
    ``above``.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (least < value if above else least <= value) or not value < below:
        bounds = f"{'above' if above else 'at least'} {least}" + (f" and below {below}" if below < float("inf") else "")
        raise ConfigError(f"{name} must be a number {bounds}, got {value!r}")
