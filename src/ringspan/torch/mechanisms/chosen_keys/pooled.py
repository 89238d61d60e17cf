"""Parts of indexes of blocks and of pooled keys; ``ringspan.families`` has the indexes.

Blocks and pools begin with their document, also in packed and padded rows. Each rank computes the entries of its own
tokens; the rank of a pool's last token fetches the others and computes it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringspan.core.selection import Index
from ringspan.torch.engine.attention.cached import current_turn
from ringspan.torch.engine.attention.handler import handled
from ringspan.torch.mechanisms.chosen_keys.cached import (
    best_of_shares,
)
from ringspan.torch.mechanisms.chosen_keys.choice import (
    Choice,
    group_now,
    rows_now,
)
from ringspan.torch.mechanisms.chosen_keys.chosen import (
    IndexInputs,
    choose,
    packed,
)
from ringspan.torch.mechanisms.chosen_keys.windows import (
    Row,
    Windows,
    at_columns,
    before,
    fetched,
    windows_of,
)


def choice_of_rows(
    chosen: Callable[[slice, Row], Tensor], device: torch.device
) -> Choice:
    """Return the choice of a pass without a cache; ``chosen(part, row)`` gives it for each slice of the batch."""

    def of_row(part: slice, row: Row) -> tuple[Tensor]:
        return (packed(chosen(part, row), row.length),)

    return Choice(
        None, [handled(partial(of_row, *each))[0] for each in rows_now(device)]
    )


Pool = Callable[[Tensor, slice, Windows], Tensor]
"""Maps windows' tokens (b, k, reach, C), of some rows, to entries (b, k, E)."""


def entries_of_row(
    x: Tensor, part: slice, row: Row, size: int, reach: int, pool: Pool
) -> tuple[Windows, Tensor]:
    """Return a row's windows of inputs (B, T, C), and the entries that this rank computes."""
    windows = windows_of(row, size, reach)
    tokens = fetched(x[part], windows.inputs, group_now())
    return windows, pool(at_columns(tokens, windows.columns), part, windows)


class HeldEntries(NamedTuple):
    """Entries of a row over a cache: all of them if ``numbers`` is None, otherwise this rank's."""

    part: slice
    windows: Windows
    entries: Tensor
    numbers: Tensor | None


def entries_of_cache(
    x: Tensor, size: int, reach: int, pool: Pool, pools: Any
) -> list[HeldEntries]:
    """Add the entries that new tokens (B, T, C) complete to a cache; return each row's entries."""
    turn = current_turn()
    assert turn is not None, "there is a cache"
    rows, first = rows_now(x.device, pools.count), turn.start // size
    inputs, count = pools.join(x, turn), -(-turn.new.length // size) - first
    all_windows, new, is_new = [], [], []
    for part, row in rows:
        windows, made = entries_of_row(inputs, part, row, size, reach, pool)
        new.append(
            made.new_zeros(len(made), count, made.shape[-1]).index_copy_(
                1, windows.numbers - first, made
            )
        )
        is_new.append(
            (windows.entries.positions[first] >= turn.start).expand(len(made))
        )
        all_windows.append(windows)
    entries = pools.add(torch.cat(new), torch.cat(is_new), turn)
    is_all = turn.is_split or turn.new.ranks == 1
    numbers = None if is_all else pools.numbers(x.device)
    return [
        HeldEntries(part, windows, entries[part], numbers)
        for (part, _), windows in zip(rows, all_windows, strict=True)
    ]


def best_entries(index: IndexInputs, held: HeldEntries) -> Tensor:
    """Return the numbers (b, T, k) of the entries that a row's queries choose, -1 for none."""
    windows = held.windows
    of_row = of_rows(index, held.part, held.entries, windows)
    # This rank has every entry, or the choice takes all: no exchange of scores is needed.
    if held.numbers is None or of_row.topk == windows.most:
        return choose(of_row, windows.first, windows.stop)
    sees = (held.numbers >= windows.first[:, None]) & (
        held.numbers < windows.stop[:, None]
    )
    turn = current_turn()
    assert turn is not None, "there is a cache"
    return best_of_shares(of_row, held.numbers, sees[None], turn.group)


def choose_pools(index: IndexInputs, size: int, pool: Pool, pools: Any) -> Choice:
    """Choose pools of ``size`` tokens, counted from the start of a document; ``pools`` are those of a cache."""
    if pools is not None:
        held = entries_of_cache(index.k, size, size, pool, pools)
        found = [each.windows.tokens(best_entries(index, each)) for each in held]
        most = max(each.shape[-1] for each in found)
        return Choice(
            None,
            [
                torch.cat(
                    [pad(each, (0, most - each.shape[-1]), value=-1) for each in found]
                )
            ],
        )

    def chosen(part: slice, row: Row) -> Tensor:
        windows, made = entries_of_row(index.k, part, row, size, size, pool)
        keys = fetched(made, windows.entries, group_now())
        found = choose(of_rows(index, part, keys, windows), windows.first, windows.stop)
        return windows.tokens(found)

    return choice_of_rows(chosen, index.q.device)


def of_rows(
    index: IndexInputs, part: slice, keys: Tensor, windows: Windows
) -> IndexInputs:
    """Return an index restricted to some rows, with the keys that they choose among."""
    return index.of_rows(part)._replace(k=keys, topk=min(index.topk, windows.most))


def tokens_before(
    x: Tensor, reach: int, cache: Any, layer: int, name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each row's tokens (b, n, C) and the columns (T, reach) of those up to each of x (B, T, C), or -1."""
    tail, turn = (
        None if cache is None else cache.tail(layer, name, reach),
        current_turn(),
    )
    rows = rows_now(x.device, 0 if tail is None else tail.count)
    x = x if tail is None else tail.join(x, turn)
    for part, row in rows:
        fetch, columns = before(row, reach)
        yield fetched(x[part], fetch, group_now()), columns


def cost_of_pools(
    index: Any, token: int, *, heads: int, size: int, topk: int, inputs: int
) -> Index:
    """Count an index of pools of ``size`` tokens for the planner; a query also attends to those after its last pool.

    ``token``: numbers fetched of each token that is attended to; ``inputs``: of one that no pool has yet.
    """
    return Index(
        topk=topk,
        token=token,
        scored=round(heads * size * index.key_numbers),
        key=index.key_numbers,
        tail=(size - 1, inputs),
        size=size,
        keys=size,
        others=(size - 1) / 2,
        kept=topk * size + size - 1,
    )
