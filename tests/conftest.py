"""Settings and the pool of ranks that every test shares."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings

from ringspan.torch.runtime.forks import serve_forks
from tests.budget import Budget
from tests.fuzz import FACTOR
from tests.pool import Pool
from tests.tiers import HEAVY, group, tier

# to look for garbage among what three frameworks hold is a tenth of the tests' time
gc.set_threshold(50_000, 20, 10)

if not torch.cuda.is_available():
    # before our Triton kernels are imported: Triton reads it when it decorates
    os.environ["TRITON_INTERPRET"] = "1"

# `make test` draws the same examples each time, so that a red run is about the change; `make fuzz` draws new ones.
# No deadline: the first call in a process pays for warming up.
settings.register_profile(
    "ringspan", deadline=None, derandomize=FACTOR <= 1, print_blob=FACTOR > 1
)
settings.register_profile(
    "unshrunk",
    settings.get_profile("ringspan"),
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("ringspan")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("a", "b"),
        help="run only the files of this step (tests/tiers.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # workers report to the one that sums up
    step = config.getoption("tier")
    if step and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Budget(step))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = config.getoption("tier")
    if (
        wanted
        and collection_path.name.startswith("test_")
        and collection_path.suffix == ".py"
    ):
        return tier(collection_path) != wanted or None
    return None


@pytest.fixture(scope="session", autouse=True)
def server(request: pytest.FixtureRequest) -> None:
    """Import what ranks need once, meanwhile, and not in each rank of each test."""
    if Pool.start_method == "fork":
        return
    folders = {
        part
        for item in request.session.items
        for part in item.nodeid.partition("::")[0].split("/")
    }
    # The folders whose tests start ranks of their own.
    if folders & {"bench", "cli", "hf", "train"} or any(
        "pool" in getattr(item, "fixturenames", ()) for item in request.session.items
    ):
        trainers = ["tests.hf.trainers"] if "hf" in folders else []
        # An operator's first call imports torch._dynamo: on a busy machine a minute, in which the other ranks wait.
        serve_forks(
            "torch._dynamo",
            "ringspan.train.loop",
            "transformers.models.llama.modeling_llama",
            *trainers,
        )


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # a test draws the same numbers whichever ran before it


# of xdist, whose own groups do nothing since pytest 9.2
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one worker all that needs the pool, one what needs trainers' worlds: there is one of each."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Workers compare the names of their tests, and an object lies elsewhere in each of them.
    if placed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(
            f"{placed[0]} is named by the place of an object; give it an id"
        )
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what is imported by now stays
    if session.config.getoption("tier") == "a" and (
        slow := sorted(HEAVY & set(sys.modules))
    ):
        raise pytest.UsageError(
            f"tests of the first step import {', '.join(slow)}; import them in a function"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = sum(
        "no GPU" in str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    if skipped:
        terminalreporter.write_line(f"{skipped} GPU tests skipped: there is no GPU")
