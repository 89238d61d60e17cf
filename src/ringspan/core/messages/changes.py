"""Differences between two versions of a configuration."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast


def differences(before: Any, now: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name and both values of what differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        old, new = cast(dict[str, Any], before), cast(dict[str, Any], now)
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    elif before != now:
        yield prefix, before, now


def first_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first changed field, or None; skip fields of only one transformers release."""
    same_release = before["transformers"] == now["transformers"]
    for name in before.keys() & now.keys() - {"transformers"}:
        for field, old, new in differences(before[name], now[name]):
            is_absent = None in (old, new)  # as good as false
            if not (is_absent and (not same_release or old is False or new is False)):
                return f"{field} = {json.dumps(old)} in the model's {name}, where it is {json.dumps(new)} now"
    return None
