"""Worlds of so many ranks: a trainer takes all ranks that were launched."""

from collections.abc import Callable, Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], Pool]]:
    """The pool of so many launched ranks, started when it is first asked for."""
    pools: dict[int, Pool] = {}

    def of(size: int) -> Pool:
        if size not in pools:
            pools[size] = Pool(size, launched=True)
        return pools[size]

    yield of
    for pool in pools.values():
        pool.close()
