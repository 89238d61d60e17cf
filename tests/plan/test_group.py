"""Plans of answers to one prompt: as a tree of segments, and as separate rows."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import ringspan as rs
from ringspan.cli.main import app
from ringspan.core.errors import UnsupportedError
from ringspan.core.schedule.schedule import make_schedule
from ringspan.plan.cost.memory import training_memory
from ringspan.plan.group import compare_group
from ringspan.plan.model.configs import from_config
from ringspan.plan.planner import make_plan
from tests.plan.test_documents import question
from tests.torch.models import config


def test_a_tree_is_planned_by_its_own_tokens_and_pairs():
    ways = compare_group(question(batch=2), 8, 3072, 128)
    tree, rows = ways["tree"], ways["rows"]
    assert (tree["tokens"], rows["tokens"]) == (2 * 4096, 2 * 8 * 3200)
    mask = rs.tree([3072, *[128] * 8], [-1, *[0] * 8])
    assert (
        tree["pairs"]
        == 2 * make_schedule(rs.Layout("contiguous", 4096, 1), mask, 0).num_pairs
    )
    assert rows["pairs"] == 2 * 8 * 3200 * 3201 // 2
    one = make_plan(question(batch=16, length=3200))
    assert (
        rows["step_seconds"] == one.cost.seconds
        and rows["peak_bytes"] == one.memory.peak_bytes
    )
    assert tree["step_seconds"] < rows["step_seconds"] / 3
    plain = make_plan(question(batch=2, length=4096))
    assert (
        tree["peak_bytes"]
        <= training_memory(plain.question.shape, plain.setting).peak_bytes
    )
    assert tree["micro_batch"] == 1


def test_a_tree_may_be_too_long_for_what_holds_a_row():
    ways = compare_group(question(parameter_dtype="bfloat16"), 64, 400_000, 100_000)
    assert (
        ways["rows"]["fits"]
        and not ways["tree"]["fits"]
        and ways["tree"]["step_seconds"] is None
    )


def test_the_command_prints_both_ways():
    options = ["plan", "--group", "8", "--prompt", "32768", "--completion", "1024"]
    printed = CliRunner().invoke(app, options).output
    assert "40,960" in printed and "270,336" in printed
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert found["tree"]["step_seconds"] < found["rows"]["step_seconds"] / 4


def test_a_model_with_an_index_is_named():
    """Its keys are chosen from one range for each query, which those of a tree are not."""
    shape = from_config(config("glm_moe_dsa").to_dict(), "indexed")
    with pytest.raises(
        UnsupportedError,
        match=r"indexed: --group 4 does not go with .* an index.*leave --group out",
    ):
        compare_group(replace(question(), shape=shape), 4, 1000, 100)
