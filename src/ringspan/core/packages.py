"""Objects that installed packages add to ringspan by entry points of their own."""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ringspan.core.errors import ConfigError


def of_packages(
    group: str, is_one: Callable[[object], bool], noun: str
) -> Iterator[object]:
    """Yield the objects of a group of entry points; an entry names one object or a list of them.

    Raises:
        ConfigError: an entry that cannot be loaded, or that is something else than a ``noun``.
    """
    for point in entry_points(group=group):
        yield from _loaded(point, is_one, noun)


def _loaded(
    point: EntryPoint, is_one: Callable[[object], bool], noun: str
) -> list[object]:
    where = f"{point.group} of an installed package: {point.name} = {point.value}"
    try:
        found: Any = point.load()
    except Exception as error:
        raise ConfigError(
            f"{where} cannot be loaded ({type(error).__name__}: {error}); update or uninstall that package"
        ) from error
    several: list[object] = [*found] if isinstance(found, list | tuple) else [found]
    if not all(is_one(each) for each in several):
        raise ConfigError(
            f"{where} is no {noun}, nor a list of them; update or uninstall that package"
        )
    return several
