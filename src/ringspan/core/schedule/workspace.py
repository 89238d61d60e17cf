"""Sizes of one attention, and a kernel's bytes for one launch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from ringspan.core.codec import EXACT, Codec
from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunch, KernelLaunches
from ringspan.core.schedule.route import Heads
from ringspan.core.selection import Index

_FLOAT32: Final = 4
MOST_HEAD_GROUPS: Final = 8

# Pairs of a mean tile over all heads of a group. On an accelerator this is about a millisecond: such a launch fills it,
# and the cost of a hop's few calls is negligible. On CPU, smaller tiles cost more than they hide (measured).
WORTH_A_CALL: Final = 1 << 29
WORTH_A_CALL_ON_CPU: Final = 1 << 20
# Pairs of all of a rank's gathered keys. In forward a group's messages and launches take an accelerator's host about a
# millisecond (benchmarks/results, gpu-*.json), in which the accelerator computes this number.
WORTH_A_GATHER: Final = 3 << 29
# Bytes of gathered keys, with the same again of values, that are small next to an accelerator's memory.
FREE_KEY_BYTES: Final = 1 << 29


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention that cost time and bytes."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    # Numbers per token of the latents that travel instead of all heads' keys and values; 0 if these travel.
    latent_dim: int = 0
    index: Index | None = None
    sent_as: Codec = EXACT
    """The encoding of keys and values in messages."""

    @property
    def sum_itemsize(self) -> int:
        """Bytes of a number in log-sum-exps, gradients and partials."""
        return max(self.itemsize, _FLOAT32)

    @property
    def query_numbers(self) -> int:
        return self.batch * self.heads * self.head_dim

    @property
    def query_bytes(self) -> int:
        return self.query_numbers * self.itemsize

    @property
    def kv_numbers(self) -> int:
        """Numbers of a token that travel."""
        return self.batch * (
            self.latent_dim or self.kv_heads * (self.head_dim + self.value_dim)
        )

    def of(self, heads: Heads) -> "Shape":
        return replace(
            self,
            heads=heads.queries.stop - heads.queries.start,
            kv_heads=heads.keys.stop - heads.keys.start,
        )


def _fewest_groups(num_kv_heads: int, blocks: int, free_blocks: float) -> int:
    """Return the fewest head groups with ``blocks`` blocks of one at most two of all heads, or ``free_blocks``."""
    divisors = (n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0)
    return next(
        (n for n in divisors if blocks <= max(2, free_blocks) * n), num_kv_heads
    )


def head_groups(
    num_heads: int, num_kv_heads: int, ranks: int, tile_pairs: int, *,
    on_cpu: bool, blocks: int = 2, rank_pairs: int = 0, key_bytes: int = 0, at_once: int = 1,
) -> int:  # fmt: skip
    """Return the number of groups of heads that run one after the other, the same on every rank.

    ``blocks`` blocks of a group weigh at most two of all heads, if key/value heads allow; on an accelerator also if
    their keys, ``key_bytes`` in a block of all heads, are little. Up to eight groups if a call has enough work, so that
    a group's last gradients travel while the next computes ``at_once`` heads. ``num_heads`` counts those of all
    sequences; ``tile_pairs`` and ``rank_pairs`` are ``Schedule``'s.
    """
    if ranks == 1:
        return 1
    # A gathered pass computes all of the rank's pairs in one call.
    worth = WORTH_A_CALL_ON_CPU if on_cpu else WORTH_A_CALL
    if blocks > ranks and not on_cpu:
        worth, tile_pairs = WORTH_A_GATHER, rank_pairs
    divisors = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0]
    fitting = (
        n
        for n in reversed(divisors)
        if n <= MOST_HEAD_GROUPS
        and num_heads // n >= at_once
        and num_heads // n * tile_pairs >= worth
    )
    free = 0 if on_cpu or not key_bytes else FREE_KEY_BYTES / key_bytes
    return max(_fewest_groups(num_kv_heads, blocks, free), next(fitting, 1))


class Taken(NamedTuple):
    most: int
    partial: int  # bytes of the partial that it returns; 0 if it adds in place
    is_short: bool  # True if the partial has fewer bits than sums have


class Gradients(NamedTuple):
    """Bytes that a launch of a backward pass takes."""

    most: int
    # Bytes of the dq, dk and dv that it returns; 0 if it adds in place.
    values: tuple[int, int, int] = (
        0,
        0,
        0,
    )
    is_short: bool = False  # True if these have fewer bits than sums have


class Kernel(Protocol):
    """Grouping of tiles, and the bytes that a launch takes beyond its inputs and sums."""

    def launches(self, tiles: tuple[Tile, ...]) -> KernelLaunches: ...

    def forward_bytes(self, launch: KernelLaunch) -> Taken: ...

    def backward_bytes(self, launch: KernelLaunch) -> Gradients: ...


@dataclass(frozen=True)
class Returning:
    """A kernel that returns new partials and gradients, in its inputs' dtype, for the given heads."""

    shape: Shape
    group: Callable[[tuple[Tile, ...]], KernelLaunches]

    def launches(self, tiles: tuple[Tile, ...]) -> KernelLaunches:
        return self.group(tiles)

    def forward_bytes(self, launch: KernelLaunch) -> Taken:
        shape = self.shape
        out = shape.batch * shape.heads * shape.value_dim * shape.itemsize
        lse = shape.batch * shape.heads * shape.sum_itemsize
        partial = launch.num_rows * (out + lse)
        return Taken(partial, partial, is_short=shape.itemsize < shape.sum_itemsize)

    def backward_bytes(self, launch: KernelLaunch) -> Gradients:
        shape = self.shape
        row, key = shape.query_bytes, shape.batch * shape.kv_heads * shape.itemsize
        key *= launch.num_keys
        sizes = row * launch.num_rows, key * shape.head_dim, key * shape.value_dim
        return Gradients(
            sum(sizes), sizes, is_short=shape.itemsize < shape.sum_itemsize
        )


def merge_bytes(shape: Shape, rows: int, *, converts: bool = False) -> int:
    """Count bytes of merging a partial in plain PyTorch: two numbers a row, or one and a float32 copy."""
    row = shape.batch * shape.heads * shape.sum_itemsize
    return rows * (row + max(row, row * shape.value_dim if converts else 0))


def merge_many_bytes(shape: Shape, rows: int, partials: int) -> int:
    """Count bytes of merging several partials: shares and log-sum-exp, the float32 sum, a copy of one partial."""
    row = shape.batch * shape.heads * shape.sum_itemsize
    return 0 if partials < 2 else rows * row * (partials + 1 + 2 * shape.value_dim)
