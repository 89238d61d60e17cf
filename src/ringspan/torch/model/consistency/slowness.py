"""The judge of a slow rank or link: pure arithmetic on what all ranks have measured, window after window.

A window's figures are the least of its steps, since other processes lengthen some steps, but hardly every one; and only
what is slow in several windows in a row is named.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

WINDOW_STEPS: Final = 4
_WINDOWS: Final = 4  # in a row, before something is named
_SLOWER: Final = 1.25
_LINK_SLOWER: Final = 2.0
# A slow link delays what its two ranks send to others, so a link with much less of a wait is not named beside it.
_OF_WORST_LINK: Final = 0.5
# Share of a step's time below which slowness is not worth a line.
_LEAST_SHARE: Final = 0.03

Link = tuple[int, int]
"""Sender and receiver."""


@dataclass(frozen=True)
class RankTimes:
    """Least seconds of a window's steps on one rank.

    Of a (query, key) pair of the rank's own block, whose shape is the same on all ranks; of computing and waiting in
    hops; of a step.
    """

    pair_seconds: float
    compute_seconds: float
    wait_seconds: float
    step_seconds: float


@dataclass
class _Suspicion:
    """Something that may be slow: its slow windows in a row, and, once it is named, its other windows since."""

    since: int
    windows: int = 0
    is_named: bool = False
    windows_without: int = 0


@dataclass
class Judge:
    """Judge of what is slow, from the figures of all ranks, window after window; the same on every rank.

    ``hosts`` are by rank.
    """

    hosts: Sequence[str]
    _known: dict[int | Link, _Suspicion] = field(default_factory=dict)

    def judge(
        self,
        first_step: int,
        times: Sequence[RankTimes],
        links: Mapping[Link, float] | None = None,
    ) -> list[str]:
        """Take in a window that began with a step; return a line for each rank and link that is slow from now on.

        ``links``: least seconds of a step that a receiver waited although its message had been sent.
        """
        step_seconds = min(each.step_seconds for each in times)
        found: dict[int | Link, str] = {
            rank: self._rank_line(rank, *figures)
            for rank, figures in slow_ranks(times).items()
        }
        for link, figures in slow_links(links or {}, self.hosts, step_seconds).items():
            found[link] = self._link_line(link, *figures)
        return self._settle(found, first_step)

    def _settle(self, found: Mapping[int | Link, str], first_step: int) -> list[str]:
        """Count windows of what was found and of what no longer is; return what is worth a line."""
        known, lines = self._known, list[str]()
        for name, line in found.items():
            each = known.setdefault(name, _Suspicion(first_step))
            each.windows, each.windows_without = each.windows + 1, 0
            if each.windows >= _WINDOWS and not each.is_named:
                each.is_named = True
                lines.append(line.format(since=each.since))
        for name in [name for name in known if name not in found]:
            each = known[name]
            each.windows_without += 1
            if not each.is_named:
                del known[name]
            elif each.windows_without >= _WINDOWS:
                del known[name]
                since = first_step - (_WINDOWS - 1) * WINDOW_STEPS
                lines.append(self._end_line(name, since))
        return lines

    def _rank(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank]})"

    def _link(self, link: Link) -> str:
        sender, receiver = map(self._rank, link)
        return f"the link from {sender} to {receiver}"

    def _rank_line(self, rank: int, ratio: float, lost: float) -> str:
        return _escaped(self._rank(rank)) + (
            f" computes {ratio:.1f} times as long as the median since step {{since}}; the others wait up to "
            f"{lost:.2g} s a step for it"
        )

    def _link_line(self, link: Link, lost: float, typical: float) -> str:
        return _escaped(self._link(link)) + (
            f" is slow since step {{since}}; rank {link[1]} waits {lost:.2g} s a step for what rank {link[0]} has "
            f"already sent, over the median link {typical:.2g} s"
        )

    def _end_line(self, name: int | Link, since: int) -> str:
        if isinstance(name, int):
            return f"{self._rank(name)} computes no longer than the others since step {since}"
        return f"{self._link(name)} is as fast as the others since step {since}"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def typical_pair(times: Sequence[RankTimes]) -> float:
    """Return the median rank's seconds of a pair."""
    return statistics.median_low([each.pair_seconds for each in times])


def slow_ranks(times: Sequence[RankTimes]) -> dict[int, tuple[float, float]]:
    """Return, by rank, how many times as long it computes as the median, and how many seconds of a step that costs."""
    typical = typical_pair(times)
    found: dict[int, tuple[float, float]] = {}
    for rank, each in enumerate(times):
        if typical <= 0 or each.pair_seconds < _SLOWER * typical:
            continue
        ratio = each.pair_seconds / typical
        lost = each.compute_seconds * (1 - 1 / ratio)
        if lost >= _LEAST_SHARE * each.step_seconds:
            found[rank] = ratio, lost
    return found


def slow_links(
    waits: Mapping[Link, float], hosts: Sequence[str], step_seconds: float
) -> dict[Link, tuple[float, float]]:
    """Return, by link, the seconds of a step that its receiver waits, and the median link's.

    A link between hosts is compared with others between hosts, one within a host with others within hosts.
    """
    found: dict[Link, tuple[float, float]] = {}
    for is_inside in (True, False):
        alike = {
            (sender, receiver): seconds
            for (sender, receiver), seconds in waits.items()
            if (hosts[sender] == hosts[receiver]) == is_inside
        }
        if len(alike) < 2:
            continue
        typical = statistics.median_low(alike.values())
        for link, seconds in alike.items():
            if seconds >= max(_LINK_SLOWER * typical, _LEAST_SHARE * step_seconds):
                found[link] = seconds, typical
    worst = max((seconds for seconds, _ in found.values()), default=0.0)
    return {
        link: figures
        for link, figures in found.items()
        if figures[0] >= _OF_WORST_LINK * worst
    }
