"""Block sizes to tune, and the constants that ``attention``'s kernels are compiled with."""

from typing import Any, Final, NamedTuple

import triton

from ringspan.gpu.table import GRAIN

# Bytes of a head's padded row: 128 numbers of half precision, 64 of float32.
_NARROW: Final = 256


class Blocks(NamedTuple):
    """Rows, keys, warps and stages to tune: ``narrow`` for head rows of at most ``_NARROW`` bytes, else ``wide``."""

    narrow: tuple[tuple[int, int, int, int], ...]
    wide: tuple[tuple[int, int, int, int], ...]

    def configs(self, row_bytes: int) -> list[Any]:
        return [
            triton.Config(
                {"ROWS": rows, "KEYS": keys}, num_warps=warps, num_stages=stages
            )
            for rows, keys, warps, stages in (
                self.narrow if row_bytes <= _NARROW else self.wide
            )
        ]


# These fit, by the compiler's count (benchmarks/triton_kernels.py), into the 227 KiB of shared memory of a Hopper and,
# in half precision, into its registers except for a few hundred bytes. The last ones fit older devices. Tuning skips a
# block that is too large for a device.
FORWARD: Final = Blocks(
    ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2)),
    ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), (64, 16, 4, 2)),
)
BACKWARD_QUERIES: Final = Blocks(
    ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 8, 2)),
    ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), (32, 16, 4, 2)),
)
BACKWARD_KEYS: Final = Blocks(
    ((64, 128, 8, 2), (64, 64, 8, 2), (32, 64, 8, 2)),
    ((64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
)


def interpreted(program: object) -> object:
    """Return the program for the interpreter, in blocks so small that small problems have several."""
    return triton.heuristics({"ROWS": lambda _: 32, "KEYS": lambda _: 16})(program)


def options(
    size: int,
    value_size: int,
    *,
    is_float32: bool,
    has_cap: bool,
    has_slopes: bool = False,
) -> dict[str, Any]:
    """Return a launch's options: padded head sizes and the precision of products."""
    # A matrix product needs a power of two, at least 16. Float32 takes three TF32 products, which are as accurate: the
    # sums of real float32 products would not fit into registers.
    padded = tuple(max(16, triton.next_power_of_2(each)) for each in (size, value_size))
    return {
        "SIZE": padded[0],
        "VALUE_SIZE": padded[1],
        "IS_EVEN": padded == (size, value_size),
        "HAS_CAP": has_cap,
        "HAS_SLOPES": has_slopes,
        "PRECISION": "tf32x3" if is_float32 else "tf32",
        "GRAIN": GRAIN,
    }
