"""Attention to a cache in shares, on rings of threads, against the float64 oracle: any turns, masks, padding, index."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringspan.core import reference
from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.core.geometry.shares import Shares
from ringspan.torch.engine.attention import cached
from ringspan.torch.engine.attention.cached import Reach, Turn, merged
from ringspan.torch.engine.attention.request import Request
from ringspan.torch.engine.kernels.contract import Scores
from ringspan.torch.engine.transport.exchange import TensorSpec
from ringspan.torch.engine.transport.protocol import FakeTransport, transport_of
from ringspan.torch.mechanisms.chosen_keys import cached as index_cached
from ringspan.torch.mechanisms.chosen_keys.chosen import Blocks, IndexInputs
from tests.fuzz import examples
from tests.torch.mechanisms.chosen_keys.test_indexed import allowed_by, index_scores
from tests.torch.virtual import on_ranks

LIMIT = 3e-6  # the design's Numbers: float32, relative
HEADS, GROUPS, SIZE, VALUE_SIZE = 4, 2, 8, 6


class Group:
    """A ring of threads where a process group is meant: its collectives go over the threads' messages."""

    def __init__(self, rank: int, ranks: int, transport: FakeTransport) -> None:
        self.rank, self.ranks, self.transport, self._calls = rank, ranks, transport, 0

    def all_gather(self, places: list[Tensor], mine: Tensor) -> None:
        self._calls += 1
        spec, others = (
            TensorSpec.like(mine),
            [rank for rank in range(self.ranks) if rank != self.rank],
        )
        messages = self.transport.among(range(self.ranks), "gather")
        transfer, pending = messages.post(
            [(rank, mine) for rank in others],
            [(rank, spec) for rank in others],
            self._calls,
        )
        transfer.wait()
        places[self.rank].copy_(mine)
        for rank, each in zip(others, pending, strict=True):
            places[rank].copy_(each.read())


class Collectives:
    """Of torch.distributed what ``cached`` uses."""

    ProcessGroup, ReduceOp = Group, torch.distributed.ReduceOp

    @staticmethod
    def get_world_size(group: Group) -> int:
        return group.ranks

    @staticmethod
    def all_gather(places: list[Tensor], mine: Tensor, group: Group) -> None:
        group.all_gather(places, mine)

    @staticmethod
    def all_reduce(mine: Tensor, op: Any, group: Group) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        group.all_gather(
            every := [torch.empty_like(mine) for _ in range(group.ranks)], mine
        )
        mine.copy_(torch.stack(every).amax(0))


@pytest.fixture(autouse=True)
def threads_for_processes(monkeypatch):
    for module in (cached, index_cached):
        monkeypatch.setattr(module, "dist", Collectives)
        monkeypatch.setattr(module, "one_at_a_time", lambda group: torch.no_grad())
    monkeypatch.setattr(cached, "agree", lambda group, facts: None)

    def messages(group: Any, name: str) -> Any:
        return (
            transport_of(None, name)
            if group is None
            else group.transport.among(range(group.ranks), name)
        )

    monkeypatch.setattr(cached, "transport_of", messages)
    monkeypatch.setattr(
        index_cached,
        "passing_tokens",
        lambda x, group: nullcontext(messages(group, "tokens")),
    )


class Text:
    """Random queries, keys and values of a few sequences, and their dense truth."""

    def __init__(
        self,
        length: int,
        kind: LayerMask,
        real: list[tuple[tuple[int, int], ...]] | None,
        softcap: float = 0.0,
        has_sinks: bool = False,
        topk: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(length)
        batch = len(real or (None,))
        groups = 1 if topk else GROUPS
        shapes = (
            (HEADS, SIZE),
            (groups, SIZE),
            (groups, VALUE_SIZE),
            (2, 4),
            (1, 4),
            (2, 1),
        )
        made = [
            torch.randn(batch, h, length, d, generator=generator) for h, d in shapes
        ]
        self.q, self.k, self.v, *index = made
        # whole numbers: scores are often equal
        self.topk, self.index = (
            topk,
            [x.mul(2).round() for x in index],
        )
        self.k[:, :, length // 2 :] *= 3  # shares whose log-sum-exps are far apart
        if topk:
            self.v = self.k[..., :VALUE_SIZE]
        self.kind, self.real, self.length = kind, real, length
        self.scores = Scores(SIZE**-0.5, softcap)
        self.sinks = torch.randn(HEADS, generator=generator) + 1 if has_sinks else None

    def seen(self, row: int) -> np.ndarray:
        """(S, S), from the definition: key j of query i."""
        i, j = np.arange(self.length)[:, None], np.arange(self.length)[None]
        allowed = j <= i
        origin = 0
        if self.real is not None:
            is_real = np.zeros(self.length, bool)
            for start, count in self.real[row]:
                is_real[start : start + count] = True
            allowed = allowed & is_real
            origin = int(is_real.argmax())
        if self.kind.window is not None:
            allowed = allowed & (i - j < self.kind.window)
        if self.kind.chunk is not None:
            allowed = allowed & (
                (i - origin) // self.kind.chunk == (j - origin) // self.kind.chunk
            )
        if self.topk:
            q, k, weights = (x[row].double().numpy() for x in self.index)
            scores = index_scores(q.swapaxes(0, 1), k[0], weights[..., 0].T, 1.0)
            best = np.argsort(np.where(allowed, -scores, np.inf), kind="stable")[
                :, : self.topk
            ]
            allowed = allowed & allowed_by(best, self.length)
        return allowed

    def truth(self) -> np.ndarray:
        q, k, v = (x.double().numpy() for x in (self.q, self.k, self.v))
        sinks = None if self.sinks is None else self.sinks.double().numpy()
        return np.concatenate(
            [
                reference.attention(
                    *(q[row : row + 1], k[row : row + 1], v[row : row + 1]),
                    self.seen(row),
                    self.scores.scale,
                    softcap=self.scores.softcap,
                    sinks=sinks,
                )[0]
                for row in range(len(self.q))
            ]
        )

    def first_seen(self, length: int) -> int:
        """The first position that is kept for tokens at ``length`` and later."""
        reach = self.kind.window or self.kind.chunk
        return 0 if reach is None else max(0, length - reach + 1)

    def on_ring(self, ranks: int, turns: list[tuple[int, bool]]) -> Tensor:
        """What the ranks compute in turns of some tokens each, split over the ring or on every rank."""
        results, _ = on_ranks(
            ranks,
            lambda rank, transport: self._on_rank(Group(rank, ranks, transport), turns),
        )
        whole = torch.full((*self.q.shape[:-1], VALUE_SIZE), torch.nan)
        for (_, is_split), *parts in zip(turns, *results, strict=True):
            for rows, out in parts:
                whole[:, :, rows] = out
                assert is_split or torch.equal(out, parts[0][1]), (
                    "all that compute a token get the same bits"
                )
        return whole

    def turns_of(
        self, group: Group, turns: list[tuple[int, bool]]
    ) -> Iterator[tuple[Turn, Tensor]]:
        """Yield a rank's turns, and positions of its share of the keys."""
        shares = Shares(group.ranks)
        for count, is_split in turns:
            start = shares.length
            first = self.first_seen(start)
            new = shares.split(count) if is_split else shares.deal(count)
            keys = shares.held(first)
            held = torch.from_numpy(keys.positions(group.rank)).clamp_max(
                self.length - 1
            )
            masks = tuple(
                self.kind.over_cache(start, start + count, real)
                for real in (self.real or (None,))
            )
            reaches = {self.kind: Reach(keys, masks)}
            yield Turn(group, group.rank, new, is_split, reaches), held

    def _on_rank(
        self, group: Group, turns: list[tuple[int, bool]]
    ) -> list[tuple[Tensor, Tensor]]:
        results = []
        for turn, held in self.turns_of(group, turns):
            q, k, v = (
                self.q[:, :, turn.positions],
                self.k[:, :, held],
                self.v[:, :, held],
            )
            scale, softcap = self.scores.scale, self.scores.softcap
            if self.topk:
                results.append((turn.positions, self._chosen(turn, q, k[:, 0], held)))
                continue
            out = turn.attend(
                Request(q, k, v, scale=scale, softcap=softcap, sinks=self.sinks),
                self.kind,
            )
            results.append((turn.positions, out))
        return results

    def _chosen(self, turn: Turn, q: Tensor, kv: Tensor, held: Tensor) -> Tensor:
        """By an index, and again by what it has chosen."""
        iq, ik, weights = self.index
        of_queries = (
            iq[:, :, turn.positions].transpose(1, 2),
            weights[:, :, turn.positions, 0].transpose(1, 2),
        )
        index = IndexInputs(
            of_queries[0], ik[:, 0, held], of_queries[1], 1.0, self.topk
        )
        options = {
            "values": slice(0, VALUE_SIZE),
            "scale": self.scores.scale,
            "sinks": self.sinks,
        }
        asked = turn, turn.reaches[self.kind], q, kv
        out, chosen = index_cached.attend_to_cache(*asked, index, None, **options)
        assert torch.equal(
            index_cached.attend_to_cache(*asked, None, chosen, **options)[0], out
        )
        return out


def check(text: Text, ranks: int, turns: list[tuple[int, bool]]) -> None:
    expected = text.truth()
    error = np.linalg.norm(
        text.on_ring(ranks, turns).double().numpy() - expected
    ) / np.linalg.norm(expected)
    assert error < LIMIT


turn_counts = st.lists(
    st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=5
)


def padded(
    length: int, left: int, hole: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Runs of real tokens: without some on the left, and without a few in the middle."""
    start, count = hole
    runs = (left, start - left), (start + count, length - start - count)
    return tuple((first, many) for first, many in runs if many > 0)


def all_padded(
    length: int, paddings: list[tuple[int, int, int]]
) -> list[tuple[tuple[int, int], ...]] | None:
    left = [min(each, length - 1) for each, _, _ in paddings]
    return [
        padded(length, first, (max(first + 1, hole), count))
        for first, (_, hole, count) in zip(left, paddings, strict=True)
    ] or None


any_padding = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 25), st.integers(0, 5)), max_size=3
)


@given(
    st.integers(1, 4),
    turn_counts,
    st.sampled_from(["window", "chunk", "all", "index"]),
    st.integers(1, 20),
    any_padding,
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
)
@examples(60, deadline=None)
def test_reading_and_writing_in_any_turns_is_dense_attention(
    ranks, turns, reach, size, paddings, softcap, has_sinks
):
    turns = [
        (max(count, 2 * ranks) if is_split else count, is_split)
        for count, is_split in turns
    ]
    length = sum(count for count, _ in turns)
    kind, topk = (
        LayerMask(**({reach: size} if reach in ("window", "chunk") else {})),
        size * (reach == "index"),
    )
    check(
        Text(
            length,
            kind,
            all_padded(length, paddings),
            softcap * (not topk),
            has_sinks,
            topk,
        ),
        ranks,
        turns,
    )


def best_blocks(products: np.ndarray, keys: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Return those of a query's keys, in order, that lie in the best blocks by products (S,)."""
    numbers = np.arange(len(keys)) // blocks.size
    scores = np.full(numbers.max(initial=0) + 1, -np.inf)
    np.maximum.at(scores, numbers, products[keys])
    scores[np.maximum(len(scores) - 1 - np.arange(blocks.always), 0)] = np.inf
    return keys[np.isin(numbers, np.argsort(-scores, kind="stable")[: blocks.topk])]


@given(
    st.integers(1, 4), turn_counts, st.builds(Blocks, st.integers(1, 9), st.integers(1, 4), st.integers(0, 2)),
    any_padding,
)  # fmt: skip
@examples(30, deadline=None)
def test_blocks_are_those_of_each_row_alone(ranks, turns, blocks, paddings):
    """They lie on several ranks, and many of their scores are equal."""
    turns = [
        (max(count, 2 * ranks) if is_split else count, is_split)
        for count, is_split in turns
    ]
    length = sum(count for count, _ in turns)
    text = Text(length, LayerMask(), all_padded(length, paddings))
    iq, ik, _ = text.index

    def chosen(rank: int, transport: FakeTransport) -> list[tuple[Tensor, Tensor]]:
        group, found = Group(rank, ranks, transport), []
        for turn, held in text.turns_of(group, turns):
            asked = iq[:, :, turn.positions].transpose(1, 2), ik[:, 0, held]
            reach = turn.reaches[text.kind]
            found.append(
                (
                    turn.positions,
                    index_cached.choose_blocks_of_cache(turn, reach, *asked, blocks),
                )
            )
        return found

    for positions, found in (
        turn for turns in on_ranks(ranks, chosen)[0] for turn in turns
    ):
        for row, of_row in enumerate(found.numpy()):
            products, seen = (iq[row] @ ik[row, 0].T).numpy(), text.seen(row)
            for head, column in np.ndindex(of_row.shape[:2]):
                query, keys = int(positions[column]), of_row[head, column]
                wanted = best_blocks(
                    products[head, query], np.flatnonzero(seen[query]), blocks
                )
                assert np.array_equal(np.sort(keys[keys >= 0]), wanted)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("kind", "real"),
    [
        (LayerMask(), None),
        (LayerMask(window=7), None),
        (LayerMask(chunk=9), None),
        (LayerMask(window=7), [((3, 96),), ((0, 99),)]),
        (LayerMask(chunk=9), [((3, 96),), ((0, 99),)]),
        ("index", [((3, 20), (31, 68)), ((0, 99),)]),
    ],
)
def test_a_prompt_and_then_token_after_token(kind, real, has_sinks):
    kind, topk = (LayerMask(), 7) if kind == "index" else (kind, 0)
    check(
        Text(99, kind, real, has_sinks=has_sinks, topk=topk),
        3,
        [(41, True), (17, True), (9, False), *[(1, False)] * 32],
    )


def test_merging_weighs_shares_and_counts_sinks_once():
    """Three shares of a key each, of which one saw nothing."""
    lses = torch.tensor([0.5, -torch.inf, -1.0])
    sinks = torch.tensor([0.25])
    values = torch.tensor([2.0, 0.0, -3.0])

    def share(rank: int, transport: FakeTransport) -> Tensor:
        group: Any = Group(rank, 3, transport)
        return merged(
            values[rank].view(1, 1, 1, 1), lses[rank].view(1, 1, 1), sinks, group
        )

    weights = lses.exp()
    expected = (weights * values).sum() / (weights.sum() + sinks.exp())
    for result in on_ranks(3, share)[0]:
        assert float(result) == pytest.approx(float(expected), rel=1e-6)


def test_a_token_that_nobody_saw_is_zero():
    def share(rank: int, transport: FakeTransport) -> Tensor:
        group: Any = Group(rank, 2, transport)
        return merged(
            torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf), None, group
        )

    assert all(
        torch.equal(result, torch.zeros(1, 1, 1, 2)) for result in on_ranks(2, share)[0]
    )
