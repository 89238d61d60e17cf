"""Tiles that one call of a kernel computes; cached, since every step asks the same."""

from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from ringspan.core.geometry.ranges import Ranges
from ringspan.core.geometry.tile import Tile

# Tiles are short if their rows see this number of keys or fewer, on average.
SHORT: Final = 512
_CACHED = 1024  # sets of tiles that each way of grouping remembers


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """Rows [q0, q1) against keys [k0, k1) as ``tiles``, counted from that corner, allow."""

    q0: int
    q1: int
    k0: int
    k1: int
    tiles: tuple[Tile, ...]

    @staticmethod
    def of(*tiles: Tile) -> "KernelLaunch":
        q0, k0 = min(tile.q0 for tile in tiles), min(tile.k0 for tile in tiles)
        q1, k1 = max(tile.q1 for tile in tiles), max(tile.k1 for tile in tiles)
        return KernelLaunch(
            q0, q1, k0, k1, tuple(tile.shifted(-q0, -k0) for tile in tiles)
        )

    @property
    def num_rows(self) -> int:
        return self.q1 - self.q0

    @property
    def num_keys(self) -> int:
        return self.k1 - self.k0

    @property
    def tile(self) -> Tile:
        (tile,) = self.tiles
        return tile


KernelLaunches = tuple[KernelLaunch, ...]


@lru_cache(_CACHED)
def keys_a_row(tiles: tuple[Tile, ...]) -> float:
    rows = sum(tile.num_rows for tile in tiles)
    return sum(tile.num_pairs for tile in tiles) / rows if rows else 0.0


@lru_cache(_CACHED)
def bands(tiles: tuple[Tile, ...]) -> KernelLaunches:
    """Return a launch for each tile, for kernels that take any band."""
    return tuple(KernelLaunch.of(tile) for tile in tiles)


@lru_cache(_CACHED)
def pieces(tiles: tuple[Tile, ...]) -> KernelLaunches:
    """Return a launch for each FULL, causal or anticausal piece (``Tile.split``)."""
    return tuple(KernelLaunch.of(piece) for tile in tiles for piece in tile.split())


@lru_cache(_CACHED)
def squares(tiles: tuple[Tile, ...]) -> KernelLaunches:
    """Return a launch for each FULL, square causal or mirrored piece: kernels disagree on the corner of others."""
    return tuple(
        KernelLaunch.of(square)
        for tile in tiles
        for piece in tile.split()
        for square in _square(piece)
    )


def _square(tile: Tile) -> tuple[Tile, ...]:
    """Split a FULL, causal or anticausal tile into FULL and square ones.

    A causal tile with more rows than keys is a square, and a FULL rectangle of the rows below it, which see every key:

        a . .         a . .
        a a .         a a .
        a a a   ->    a a a
        a a a         b b b

    An anticausal one is mirrored, split and mirrored back.
    """
    if tile.is_full or tile.num_rows == tile.num_keys:
        return (tile,)
    if not tile.is_causal:  # anticausal
        here = tile.shifted(-tile.q0, -tile.k0)
        mirrored = _square(here.mirrored(here.num_rows, here.num_keys))
        return tuple(
            m.mirrored(here.num_rows, here.num_keys).shifted(tile.q0, tile.k0)
            for m in mirrored
        )
    last = tile.q0 + tile.num_keys  # from this row on, rows see every key
    square = Tile(tile.q0, last, tile.k0, tile.k1, 0, tile.num_keys - 1)
    return square, Tile.full(last, tile.q1, tile.k0, tile.k1)


class Window(NamedTuple):
    """Band in flash-attn's terms, with ends aligned by the shift ``num_keys - num_rows``.

    Keys ``row + shift - left`` to ``row + shift + right``, -1 for no bound.
    """

    left: int
    right: int

    @staticmethod
    def of(tile: Tile) -> "Window":
        shift = tile.num_keys - tile.num_rows
        return Window(
            tile.hi + shift if tile.has_upper else -1,
            -tile.lo - shift if tile.has_lower else -1,
        )


@lru_cache(_CACHED)
def chains(tiles: tuple[Tile, ...]) -> KernelLaunches:
    """Return a launch for each chain of tiles with one window, consecutive in rows and keys, like packed documents."""
    found: dict[Window, list[list[Tile]]] = {}
    for tile in sorted(tiles):
        same = found.setdefault(Window.of(tile), [])
        for chain in same:
            if chain[-1].q1 <= tile.q0 and chain[-1].k1 <= tile.k0:
                chain.append(tile)
                break
        else:
            same.append([tile])
    return tuple(KernelLaunch.of(*chain) for same in found.values() for chain in same)


@lru_cache(_CACHED)
def windows(tiles: tuple[Tile, ...]) -> KernelLaunches:
    """Return ``chains`` of windows that FlashAttention 2 reads correctly, and squares for the others.

    It reads a right bound >= ``num_keys`` as none, and a missing one next to a left one as ``num_keys``: wrong with
    more rows than keys (``mha_varlen_fwd``, ``set_params_fprop`` of flash_api.cpp).
    """
    return chains(tuple(part for tile in tiles for part in _readable(tile)))


def _readable(tile: Tile) -> tuple[Tile, ...]:
    is_read = (
        tile.is_full
        or tile.num_rows <= tile.num_keys + 1
        or 0 <= Window.of(tile).right < tile.num_keys
    )
    return (
        (tile,)
        if is_read
        else tuple(one.tile.shifted(one.q0, one.k0) for one in squares((tile,)))
    )


@lru_cache(_CACHED)
def whole(tiles: tuple[Tile, ...]) -> KernelLaunches:
    """Return one launch for all tiles."""
    return (KernelLaunch.of(*tiles),) if tiles else ()


def within_ranges(
    launches: Callable[[tuple[Tile, ...]], KernelLaunches],
    tiles: tuple[Tile, ...],
    *packed: Ranges,
    passes_queries: bool = False,
) -> Iterator[KernelLaunch]:
    """Yield a hop's launches, each within one packed range of keys; of rows, if blocks are queries."""
    groups: dict[tuple[int, ...], list[Tile]] = {}
    for tile in tiles:
        first = tile.q0 if passes_queries else tile.k0
        places = tuple(
            bisect(ranges, first, key=lambda one: one[0]) for ranges in packed
        )
        groups.setdefault(places, []).append(tile)
    for group in groups.values():
        yield from launches(tuple(group))
