"""What each layout makes of packed documents: the most work of a rank over the mean, and tokens that are sent.

Counted, not timed: the causal pairs of documents as they come, on 4 to 64 ranks. Sent are the keys and values that
another rank than their owner needs, once for each that does, as by the route all-gather.

    python -m benchmarks.layouts [--json]

``chunks`` is the rule of MagiAttention's dispatch (as many chunks of 512 tokens per rank, the largest first to the rank
with the least work); ``zigzag per document`` is that of Megatron and TransformerEngine, every document split over all
ranks. ``ulysses`` sends queries, keys, values and results of all tokens, in tokens of a whole pair of key and value.
"""

import json
import os
import sys
import sysconfig
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import ringspan as rs
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.pairs import pairs_before, stretches
from ringspan.core.schedule.paths import Paths, find_paths
from ringspan.core.schedule.route import IntArray, Route

RESULT: Final = Path(__file__).parent / "results" / "layouts-counts.json"
LENGTHS: Final = (65_536, 262_144, 1_048_576)
RANKS: Final = (4, 16, 64)
CHUNK: Final = 512


def lognormal(total: int) -> list[int]:
    """Around 2,048 tokens."""
    return drawn(total, 0, 1.0)


def drawn(total: int, seed: int, sigma: float) -> list[int]:
    """Lognormal lengths around 2,048 tokens."""
    numbers = np.random.default_rng(seed)
    return _filled(
        total, iter(lambda: int(numbers.lognormal(np.log(2048), sigma)), None)
    )


def code(total: int) -> list[int]:
    """The modules of this Python installation, four bytes a token."""
    sizes = _source_files()
    order = np.random.default_rng(0).permutation(len(sizes))
    return _filled(total, (sizes[index] for index in [*order, *order, *order]))


@cache
def _source_files() -> list[int]:
    found: list[Path] = []
    for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inside[:] = [name for name in inside if name != "site-packages"]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path.stat().st_size // 4 for path in sorted(found)]


def one_long(total: int) -> list[int]:
    """One of 65,536 tokens among short ones around 2,048."""
    return [min(total, 65_536), *drawn(total - 65_536, 0, 0.5)]


def _filled(total: int, sizes: Iterator[int]) -> list[int]:
    lengths: list[int] = []
    left = total
    while left > 0:
        lengths.append(min(left, max(16, next(sizes))))
        left -= lengths[-1]
    return lengths


def chunks(documents: list[int], ranks: int) -> Layout:
    total = sum(documents)
    regions = stretches(rs.documents(documents), total).regions
    edges = np.array([*range(0, total, CHUNK), total])
    work = np.diff(pairs_before(regions, edges[:, None]).sum(1))
    room = [-(-len(work) // ranks)] * ranks
    heap = [(0, rank) for rank in range(ranks)]
    heapify(heap)
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, rank = heappop(heap)
        parts[rank].append((int(edges[chunk]), int(edges[chunk + 1] - edges[chunk])))
        room[rank] -= 1
        if room[rank]:
            heappush(heap, (load + int(work[chunk]), rank))
    return CustomLayout.of((sorted(runs) for runs in parts), total)


def zigzag_per_document(documents: list[int], ranks: int) -> Layout:
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    start = 0
    for length in documents:
        edges = [
            start + length * piece // (2 * ranks) for piece in range(2 * ranks + 1)
        ]
        for piece, (first, last) in enumerate(pairwise(edges)):
            if last > first:
                parts[min(piece, 2 * ranks - 1 - piece)].append((first, last - first))
        start += length
    return CustomLayout.of(parts, start)


LAYOUTS: Final[dict[str, Callable[[list[int], int], Layout]]] = {
    "balanced": lambda documents, ranks: rs.balanced(
        rs.documents(documents), length=sum(documents), ranks=ranks
    ),
    "zigzag": lambda documents, ranks: rs.Layout("zigzag", sum(documents), ranks),
    "zigzag per document": zigzag_per_document,
    "striped": lambda documents, ranks: rs.Layout("striped", sum(documents), ranks),
    "contiguous": lambda documents, ranks: rs.Layout(
        "contiguous", sum(documents), ranks
    ),
    "chunks": chunks,
}


def counted(layout: Layout, documents: list[int]) -> tuple[float, int]:
    """The most work over the mean, and tokens sent."""
    if layout.name == "striped":
        return _counted_by_token(layout.ranks, documents)
    total = sum(documents)
    cut = stretches(rs.documents(documents), total)
    held = sorted(
        (span.start, min(total, span.start + span.count), rank)
        for rank in range(layout.ranks)
        for span in layout.spans(rank)
        if span.start < total
    )
    work, sent = np.zeros(layout.ranks), 0
    stops = (
        np.searchsorted(cut.starts, [stop - 1 for _, stop, _ in held], side="right") - 1
    )
    edges = np.array([[start, stop] for start, stop, _ in held])
    pairs = np.concatenate(
        [
            pairs_before(cut.regions, some[..., None]).sum(-1)
            for some in np.array_split(edges, -(-len(edges) // 500))
        ]
    )
    for (start, stop, rank), last, counts in zip(
        held, stops.tolist(), pairs, strict=True
    ):
        work[rank] += int(counts[1] - counts[0])
        # the last document goes on: whoever has more of it needs these keys
        end, first = int(cut.stops[last]), max(start, int(cut.starts[last]))
        if end > stop:
            later = bisect_left(held, (stop, 0, 0))
            others: set[int] = set()
            while later < len(held) and held[later][0] < end:
                others.add(held[later][2])
                later += 1
            sent += len(others - {rank}) * (stop - first)
    return float(work.max() / work.mean()), sent


def _counted_by_token(ranks: int, documents: list[int]) -> tuple[float, int]:
    """``counted`` of a striped layout, whose every token is a run: the next ones are those of all other ranks."""
    seen = np.concatenate([np.arange(1, length + 1) for length in documents])
    work = np.bincount(np.arange(len(seen)) % ranks, weights=seen, minlength=ranks)
    sent = sum(
        int(np.minimum(ranks - 1, np.arange(length)).sum()) for length in documents
    )
    return float(work.max() / work.mean()), sent


def carried(layout: Layout, documents: list[int]) -> dict[str, object]:
    """Blocks that ranks receive, of these how many they do not compute with, and tokens: on the route ring, and if
    blocks were passed on through every rank until nobody needs them.
    """
    ring, straight = (
        find_paths(
            layout, layout, rs.documents(documents), Route.parse(name, layout.ranks)
        )
        for name in ("ring", "all-gather")
    )
    needed = _hulls(straight)[1:]  # by the rank that is so many steps behind the owner
    is_needed = _tokens(needed) > 0
    # What ranks farther on need as well, either way around.
    on = np.minimum.accumulate(needed[::-1])[::-1], np.minimum.accumulate(needed)
    passed = min(on, key=lambda each: int(_tokens(each).sum()))
    arrives = ring.tokens(ring.carried)[1:]
    is_needed_on_ring = (
        is_needed if ring.itinerary.visitor[1, 0] == 1 else is_needed[::-1]
    )
    return {
        "ring": _counted(arrives, is_needed_on_ring),
        "passed_on": _counted(_tokens(passed), is_needed),
    }


def _hulls(paths: Paths) -> IntArray:
    """Return the part that each hop carries of each owner's spans, see ``Paths``. Shape (hops, owners, spans, 2)."""
    hop, owner = np.nonzero(paths.place >= 0)
    row = np.arange(paths.first[-1])
    place = np.searchsorted(paths.first, row, "right") - 1
    hulls = np.full(
        (*paths.place.shape, int(np.diff(paths.first).max(initial=1)), 2),
        paths.nothing,
        np.int64,
    )
    hulls[hop[place], owner[place], row - paths.first[place]] = paths.carried[:, row].T
    return hulls


def _tokens(hulls: IntArray) -> IntArray:
    """Tokens of each hop's and owner's hulls."""
    return np.maximum(-hulls.sum(-1), 0).sum(-1)


def _counted(tokens: IntArray, is_needed: NDArray[np.bool_]) -> dict[str, int]:
    unused = (tokens > 0) & ~is_needed
    return {
        "received": int((tokens > 0).sum()),
        "unused": int(unused.sum()),
        "tokens": int(tokens.sum()),
    }


def rows() -> Iterator[dict[str, object]]:
    for distribution in (lognormal, code, one_long):
        for length in LENGTHS:
            documents = distribution(length)
            for ranks in RANKS:
                for name, make in LAYOUTS.items():
                    layout = make(documents, ranks)
                    balance, sent = counted(layout, documents)
                    yield {
                        "documents": distribution.__name__,
                        "num_documents": len(documents),
                        "length_tokens": length,
                        "ranks": ranks,
                        "layout": name,
                        "most_work_over_mean": round(balance, 4),
                        "sent_tokens": sent,
                    } | (
                        carried(layout, documents)
                        if name in ("balanced", "zigzag")
                        else {}
                    )
                yield {
                    "documents": distribution.__name__,
                    "num_documents": len(documents),
                    "length_tokens": length,
                    "ranks": ranks,
                    "layout": "ulysses",
                    "most_work_over_mean": 1.0,
                    "sent_tokens": 2 * length * (ranks - 1) // ranks,
                }


def main() -> None:
    found = list(rows())
    RESULT.write_text(
        json.dumps({"command": "python -m benchmarks.layouts", "rows": found}, indent=1)
        + "\n"
    )
    if "--json" in sys.argv:
        print(json.dumps({"rows": found}))
        return
    for row in found:
        print(
            f"{row['documents']!s:10} {row['length_tokens']:>9,} tokens {row['ranks']:>3} ranks  {row['layout']!s:20} "
            f"{row['most_work_over_mean']:.3f}  {row['sent_tokens']:>12,}"
        )


if __name__ == "__main__":
    main()
