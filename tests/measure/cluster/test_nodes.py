"""Routes over two nodes: what is limited, and what the published measurement says of the model."""

import json

import pytest

from benchmarks import nodes

CASES = json.loads(nodes.RESULT.read_text())[0]["result"]["cases"]
LINK_DECIDES = [case for case in CASES if case["gigabits"] <= 0.1]


@pytest.mark.parametrize(("rank", "others"), [(0, [2, 3]), (1, [2, 3]), (3, [0, 1])])
def test_only_what_goes_to_the_other_node_is_held_to_the_rate(rank, others):
    commands = [" ".join(command) for command in nodes._limits(rank, 0.25)]
    limited = [command.split("ip dst ")[1].split("/")[0] for command in commands if "ip dst" in command]
    assert limited == [f"10.0.0.{other + 1}" for other in others]
    assert sum("rate 250000000bit" in command for command in commands) == 1


@pytest.mark.parametrize(
    "case", LINK_DECIDES, ids=lambda case: f"{case['gigabits']}-{case['length']}-{case['kv_heads']}"
)
def test_the_link_model_and_its_choice_of_route_are_right(case):
    for route, found in case["routes"].items():
        for which in ("forward", "forward_backward"):
            assert 0.7 < found[f"{which}_seconds"] / found[f"predicted_{which}_seconds"] < 1.25, route
    seconds = {route: found["forward_seconds"] for route, found in case["routes"].items()}
    assert seconds[case["auto"]] < 1.1 * min(seconds.values())
    assert seconds["ring"] > 1.15 * seconds["double-ring:2"]
    assert case["speeds"]["inter_node_bytes"] < case["gigabits"] * 1e9 / 8, "the link is limited"
