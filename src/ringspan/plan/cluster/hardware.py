"""Accelerators by common names or by hand, and the block sizes that hide sending."""

import re
from dataclasses import replace
from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.plan.cluster.devices import DEVICES, GIGA, OTHER_NAMES, Device
from ringspan.plan.names import normal, unknown

__all__ = ["DEVICES", "Device", "device", "min_block_tokens", "min_tokens_per_device"]

# Words in vendors' and libraries' names of a device that do not tell two known devices apart.
_NOISE: Final = re.compile(
    "nvidia|amd|google|cloud|geforce|instinct|tesla|quadro|gpu|accelerator|generation|blackwell|server|workstation|"
    r"edition|oam|nvl72|sxm\d?|hbm\d?e?"
)
# A form factor written without a separator, as in H100SXM.
_FORM: Final = re.compile(r"(?<=\d)(sxm\d?|hbm\d?e?)$")


def min_block_tokens(flops: float, bandwidth: float) -> float:
    """Return the tokens c of a block that hide sending: ``4 d c^2 / F >= 4 c d / B``, so ``c = F / B``.

    4 d c^2 FLOPs of a query and a key block, while c x d keys and values in bfloat16 travel; ``cost`` has the constant
    of grouped heads, causal masks and float32. Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise
    Transformers", section 3.
    """
    return flops / bandwidth


def min_tokens_per_device(block_tokens: float) -> float:
    """Return the tokens of the six blocks that a ring holds: query, 2 keys, 2 values, output (same source)."""
    return 6 * block_tokens


_BY_HAND: Final = (
    "flops", "memory_bytes", "intra_node_bandwidth", "inter_node_bandwidth", "devices_per_node", "memory_bandwidth",
    "host_bandwidth", "host_memory_bytes", "launch_seconds",
)  # fmt: skip
_LEAST: Final = {"launch_seconds": 1e-9}
_WHOLE: Final = ("memory_bytes", "devices_per_node", "host_memory_bytes")
# FLOP/s, bytes or bytes/s: a million times what a device has, and far from overflow.
_MOST: Final = 1e21


def device(text: str) -> Device:
    """Return a device by name (``h100``, ``H100-SXM``, ``NVIDIA H100 80GB HBM3``, ``Trillium``) or by hand.

    A name of two devices is taken for the more common one, see ``note``. By hand, after a name whose values change or
    without one: ``flops=2e12,memory_bytes=16e9,intra_node_bandwidth=1e10,inter_node_bandwidth=1e9,devices_per_node=4``;
    the last two (one node), ``memory_bandwidth``, ``host_bandwidth``, ``host_memory_bytes`` and ``launch_seconds``
    (``h100,launch_seconds=1.5e-3``: ``ringspan doctor`` measures it) are optional.

    Raises:
        ConfigError: an unknown name (near ones are listed) or a value that is not a positive number.
    """
    name, *changes = text.split(",")
    if "=" in name:
        base, changes = None, [name, *changes]
    else:
        base = _named(name)
    values = dict(_read(change) for change in changes)
    if base is not None:
        return replace(
            base,
            **_in_kind(values),
            **({"title": f"{base.title}, changed"} if values else {}),
        )
    missing = [field for field in _BY_HAND[:3] if field not in values]
    if missing:
        raise ConfigError(
            f"--device {text!r}: a device given by hand also needs {', '.join(missing)}"
        )
    defaults = {
        "inter_node_bandwidth": values["intra_node_bandwidth"],
        "devices_per_node": 1 << 30,
    }
    return Device(
        name="by-hand", title="device given by hand", **_in_kind({**defaults, **values})
    )


def _named(name: str) -> Device:
    """Return the device of a name, with a note if another one has that name too; ConfigError if unknown."""
    if normal(name) in DEVICES:
        return DEVICES[normal(name)]
    found, other = _NAMES.get(_essence(name), ("", ""))
    if not found:
        raise unknown(
            "device", name, DEVICES, "; or give one by hand: flops=...,memory_bytes=..."
        )
    if not other:
        return DEVICES[found]
    title, second = DEVICES[found].title, DEVICES[other].title
    note = f"--device {name.strip()} is taken as {title} ({found}); write {other} for {second}"
    return replace(DEVICES[found], note=note)


def _essence(name: str) -> str:
    """Strip a name of vendors, form factors and separators: ``NVIDIA H100-SXM5 80GB`` becomes ``h10080gb``."""
    words = re.split("[^a-z0-9]+", name.lower())
    return "".join(_FORM.sub("", word) for word in words if not _NOISE.fullmatch(word))


# The essence of each alias, name and title -> the device, and the other device of that name or "".
_NAMES: Final = {_essence(name): devices for name, devices in OTHER_NAMES.items()} | {
    _essence(one): (name, "")
    for name, each in DEVICES.items()
    for one in (name, each.title, f"{name} {each.memory_bytes // GIGA} gb")
}


def _read(change: str) -> tuple[str, float]:
    """Read a property given by hand, such as ``flops=2e12``; ConfigError unless known, positive and within bounds."""
    field, _, number = change.partition("=")
    field = field.strip()
    if field not in _BY_HAND:
        raise unknown("property of a device", field, _BY_HAND)
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--device: {field}={number!r} should be a positive number")
    least = _LEAST.get(field, 1)
    if not least <= value <= _MOST:
        raise ConfigError(
            f"--device: {field}={number}: should be between {least:.0g} and {_MOST:.0e}, in bytes, FLOP and seconds"
        )
    if field in _WHOLE and not value.is_integer():
        raise ConfigError(f"--device: {field}={number}: should be a whole number")
    return field, value


def _in_kind(values: dict[str, float]) -> dict[str, Any]:
    """Convert the properties that count something to int."""
    return {
        name: int(value) if name in _WHOLE else value for name, value in values.items()
    }
