"""Sizes and dtypes that a command is asked to measure, checked before any process is started."""

from typing import Final

from ringspan.core.messages.units import shown_bytes

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST_RANKS: Final = 1024


def check_dtype(dtype: str) -> None:
    """Check ``--dtype``.

    Raises:
        UnsupportedError: a dtype that is not measured, or not on this device.
    """
    import torch

    from ringspan.core.errors import UnsupportedError

    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"--dtype {dtype!r} is not supported; use float32 or bfloat16")
    if dtype == "float16" and not torch.cuda.is_available():
        raise UnsupportedError("--dtype float16 on CPU is not supported; use float32 or bfloat16")


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Check the numbers of heads.

    Raises:
        UnsupportedError: key/value heads that do not divide the query heads.
    """
    from ringspan.core.arguments import check_shapes

    check_shapes((1, heads, 1, head_dim), *2 * [(1, kv_heads, 1, head_dim)])


def check_memory(what: str, num_bytes: int) -> None:
    """Raise for sizes that no process of this machine could hold, before any is started.

    Raises:
        ConfigError: ``num_bytes``, a part of what is needed, is more than the host's memory and the device's.
    """
    import torch

    from ringspan.core.errors import ConfigError
    from ringspan.measure.trace.rehearsal import host_memory_bytes

    has = host_memory_bytes()
    if torch.cuda.is_available():
        has = max(has, torch.cuda.mem_get_info()[1])
    if num_bytes > has:
        raise ConfigError(f"{what}: needs more than {shown_bytes(num_bytes)}, this machine has {shown_bytes(has)}")


def ring_sizes(option: str, text: str, example: str) -> tuple[int, ...]:
    """Sizes of rings.

    Raises:
        ConfigError: something that is no number, or no size of a ring.
    """
    from ringspan.core.errors import ConfigError

    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MOST_RANKS for word in words):
        raise ConfigError(f"{option} {text!r}: write numbers from 1 to {MOST_RANKS:,} with commas, such as {example}")
    return tuple(int(word) for word in words)
