"""Seconds that a test may take, and where a step's seconds went."""

import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

_BUDGETS: Final = Path(__file__).with_name("budget.toml")
_BUSY: Final = 0.15  # the share of all cores that others may use on a quiet machine
# and the share that its host may give to other machines, all the while
_LOST: Final = 0.03


class Budget:
    """A plugin of pytest that adds up what tests take, and fails a step for one above its folder's budget."""

    def __init__(self, tier: str) -> None:
        self._limits: dict[str, float] = tomllib.loads(_BUDGETS.read_text())[tier]
        self._seconds: Counter[str] = Counter()
        self._is_quiet = is_quiet()
        self._began = _ticks() if self._is_quiet else ()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._seconds[report.nodeid] += report.duration

    def _limit(self, test: str) -> float:
        path = test.partition("::")[0].removeprefix("tests/")
        return self._limits[
            max((name for name in self._limits if path.startswith(name)), key=len)
        ]

    def _over(self) -> dict[str, float]:
        return {
            test: seconds
            for test, seconds in self._seconds.items()
            if seconds > self._limit(test)
        }

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._began:
            _, lost, taken = (
                late - early for early, late in zip(self._began, _ticks(), strict=True)
            )
            self._is_quiet = is_quiet() and lost <= _LOST * taken
        if self._over() and self._is_quiet and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        folders: Counter[str] = Counter()
        for test, seconds in self._seconds.items():
            folders[
                "/".join(test.partition("::")[0].split("/")[1:3]).removesuffix(".py")
            ] += seconds
        most = ", ".join(
            f"{name} {seconds:.0f}" for name, seconds in folders.most_common(12)
        )
        terminalreporter.write_line(
            f"seconds in tests: {folders.total():.0f}, most of them in {most}"
        )
        for test, seconds in sorted(self._over().items()):
            terminalreporter.write_line(
                f"over its {self._limit(test):g} s (tests/budget.toml): {test} {seconds:.1f} s"
            )
        if self._over() and not self._is_quiet:
            terminalreporter.write_line(
                "other programs were busy, so that this fails nothing"
            )


def is_quiet() -> bool:
    """Return True if next to nothing else runs: read off /proc/stat for half a second; False without such a file."""
    try:
        before = _ticks()
        time.sleep(0.5)
        after = _ticks()
    except OSError:
        return False
    busy, _, taken = (late - early for early, late in zip(before, after, strict=True))
    return busy <= _BUSY * taken


def _ticks() -> tuple[int, int, int]:
    """Return ticks of all cores so far: those in use, those the host gave to other machines, and all."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return sum(ticks[:3]) + ticks[7], ticks[7], sum(ticks)
