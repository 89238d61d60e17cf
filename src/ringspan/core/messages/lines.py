"""Messages of one line."""

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from ringspan.core.errors import ConfigError, RingspanError

LIMIT = 300
"""Characters of other programs' text that a message of ours may quote."""


def shortened(text: str, limit: int = LIMIT) -> str:
    """Shorten a text to one line of at most ``limit`` characters, cut between words."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    kept = line[: limit - 3]
    # A single word that fills the line has no other place to be cut at.
    cut = (
        kept if line[limit - 3] == " " or " " not in kept else kept[: kept.rindex(" ")]
    )
    return cut.rstrip(" ,;:") + "..."


def one_line(error: BaseException, limit: int = LIMIT) -> str:
    return shortened(str(error), limit) or type(error).__name__


def few(items: Iterable[object], limit: int = 8) -> str:
    every = [str(item) for item in items]
    return ", ".join(every[:limit]) + (
        f" and {len(every) - limit} more" if len(every) > limit else ""
    )


@contextmanager
def refused(
    what: str,
    *kinds: type[BaseException],
    remedy: str = "",
    error_type: type[RingspanError] = ConfigError,
) -> Generator[None]:
    """Turn errors of these kinds into ours: ``what``, their message and the remedy."""
    try:
        yield
    except RingspanError:
        raise
    except kinds as error:
        raise error_type(f"{what}: {one_line(error)}{remedy}") from error


def differences(
    before: object, now: object, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name and both values of each entry that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        old, new = cast(dict[str, Any], before), cast(dict[str, Any], now)
        for key in {**old, **new}:
            yield from differences(
                old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key
            )
    elif before != now:
        yield prefix, before, now


def first_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first changed field, or None; skip fields of only one transformers release."""
    same_release = before["transformers"] == now["transformers"]
    for name in before.keys() & now.keys() - {"transformers"}:
        for field, old, new in differences(before[name], now[name]):
            is_absent = None in (old, new)  # a missing field counts as false
            if not (is_absent and (not same_release or old is False or new is False)):
                return f"{field} = {json.dumps(old)} in the model's {name}, where it is {json.dumps(new)} now"
    return None
