"""The overlap law over a rate-limited link, in small, and routes over two nodes as published.

Making the link takes root, so elsewhere what needs it is skipped, and says so.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import nodes, overlap
from benchmarks.namespaces import LINK

ROOT = Path(__file__).parents[3]


@pytest.fixture
def link() -> None:
    reason = overlap.why_not()
    if reason:
        pytest.skip(reason)


@pytest.mark.alone
@pytest.mark.usefixtures("link")
def test_a_transfer_shows_on_a_slow_link_and_hides_under_work():
    # Far from the crossing on either side, a factor 10 and 8, and again: a test machine does other things meanwhile.
    def shows_and_hides() -> bool:
        slow, busy = overlap.measure(
            [
                overlap.Sweep(gigabits=0.1, tokens=(256,), repeats=3),
                overlap.Sweep(
                    gigabits=1, heads=8, head_dim=64, tokens=(2048,), repeats=3
                ),
            ]
        )
        for sweep, tokens in ((slow, 256), (busy, 2048)):
            (row,) = sweep["rows"]
            block_bytes = 2 * tokens * sweep["head_dim"] * 4
            assert (
                block_bytes / row["transfer_seconds"] < 1.3e9 / 8 * sweep["gigabits"]
            ), "the link is limited"
        return (
            slow["rows"][0]["exposed_share"] > 0.5
            and busy["rows"][0]["exposed_share"] < 0.1
        )

    assert any(shows_and_hides() for _ in range(3))


def test_the_published_crossings_are_where_the_law_puts_them():
    (row,) = json.loads(overlap.RESULT.read_text())
    sweeps = row["result"]["sweeps"]
    assert len({sweep["gigabits"] for sweep in sweeps}) >= 3
    for sweep in sweeps:
        assert 1 / 1.5 < sweep["crossing_over_predicted"] < 1.5
        shares = [(found["tokens"], found["exposed_share"]) for found in sweep["rows"]]
        assert sweep["crossing_tokens"] == pytest.approx(overlap.crossed(shares))


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([(512, 0.9), (1024, 0.3), (2048, 0.0)], 1024 * 2 ** (2 / 3) / 0.9),
        (
            [(512, 0.3), (1024, 0.0), (2048, 0.3), (4096, 0.0)],
            2048 * 2 ** (2 / 3) / 0.9,
        ),
        ([(512, 0.9), (1024, 0.3)], None),
        ([(512, 0.0), (1024, 0.0)], None),
    ],
)
def test_the_crossing_is_where_the_share_stays_small(
    shares: list[tuple[int, float]], expected: float | None
):
    found = overlap.crossed(shares)
    assert found == (expected if expected is None else pytest.approx(expected))


def _joined(pid: int) -> dict[int, str] | None:
    """The network namespaces of the two ranks, once they are joined."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # the programs that make the link come and go
            process = Path(f"/proc/{child}")
            if (
                b"--rank" in (process / "cmdline").read_bytes()
                and f"{LINK}:" in (process / "net/dev").read_text()
            ):
                found[int(child)] = _namespace(int(child))
    return found if len(found) == 2 else None


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


CASES = json.loads(nodes.RESULT.read_text())[0]["result"]["cases"]
LINK_DECIDES = [case for case in CASES if case["gigabits"] <= 0.1]


@pytest.mark.parametrize(("rank", "others"), [(0, [2, 3]), (1, [2, 3]), (3, [0, 1])])
def test_only_what_goes_to_the_other_node_is_held_to_the_rate(rank, others):
    commands = [" ".join(command) for command in nodes._limits(rank, 0.25)]
    limited = [
        command.split("ip dst ")[1].split("/")[0]
        for command in commands
        if "ip dst" in command
    ]
    assert limited == [f"10.0.0.{other + 1}" for other in others]
    assert sum("rate 250000000bit" in command for command in commands) == 1


@pytest.mark.parametrize(
    "case",
    LINK_DECIDES,
    ids=lambda case: f"{case['gigabits']}-{case['length']}-{case['kv_heads']}",
)
def test_the_link_model_and_its_choice_of_route_are_right(case):
    for route, found in case["routes"].items():
        for which in ("forward", "forward_backward"):
            assert (
                0.7
                < found[f"{which}_seconds"] / found[f"predicted_{which}_seconds"]
                < 1.25
            ), route
    seconds = {
        route: found["forward_seconds"] for route, found in case["routes"].items()
    }
    assert seconds[case["auto"]] < 1.1 * min(seconds.values())
    assert seconds["ring"] > 1.15 * seconds["double-ring:2"]
    assert case["speeds"]["inter_node_bytes"] < case["gigabits"] * 1e9 / 8, (
        "the link is limited"
    )
