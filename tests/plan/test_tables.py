"""The pages say what the code computes, and what was published."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.planning_tables import (
    DOCS,
    PAGES,
    PUBLISHED_CONTEXT,
    TABLES,
    fill,
    layer_bytes,
    longest_contexts,
)
from ringspan.plan.cluster.hardware import DEVICES
from ringspan.plan.cost.memory import training_memory
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.shards import host_bytes
from ringspan.plan.model.configs import MODELS

PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES)


def rows(name):
    lines = re.search(rf"<!-- table {name} -->\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)[
        1
    ].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.long
def test_the_pages_hold_every_table_as_the_code_computes_it():
    assert [
        name for name in re.findall(r"<!-- table ([a-z-]+) -->", PAGE) if name in TABLES
    ] == list(TABLES)
    assert fill(PAGE) == PAGE


@pytest.mark.long
def test_a_changed_number_is_noticed():
    assert (
        fill(PAGE.replace("| 14.4 |", "| 14.5 |"))
        == PAGE
        != PAGE.replace("| 14.4 |", "| 14.5 |")
    )


def test_what_the_pages_say_about_their_tables():
    assert rows("flops-ratios")[-1][3] == "14.4"
    on_devices = [float(row[6].rstrip("x")) >= 4 for row in rows("contexts")]
    with_hosts = [
        float((row[9] or row[6]).rstrip("x")) >= 4 for row in rows("contexts")
    ]
    assert (sum(on_devices), sum(with_hosts), len(with_hosts)) == (12, 13, 13)
    beyond = [
        (row[0], row[1])
        for row in rows("contexts")
        if float(row[4].split()[0]) > float(row[4].split()[2])
    ]
    assert beyond == [("32x A100 InfiniBand", "llama-7b")]
    [short] = [row for row in rows("contexts") if float(row[6].rstrip("x")) < 4]
    assert [short[0], short[1]] in [list(row) for row in beyond]
    assert f"32x A100 ({short[6]})" in PAGE
    assert (
        f"it would be {float(short[5].rstrip('K').replace(',', '')) / 1024:.1f}x"
        in PAGE
    )
    for _, kind, devices, model, _, _ in PUBLISHED_CONTEXT:
        on_device, with_host = longest_contexts(kind, devices, model)
        assert on_device.route == "bidirectional" and on_device.feedforward_tokens
        assert (
            training_memory(MODELS[model], on_device).peak_bytes
            <= DEVICES[kind].memory_bytes
        )
        if with_host:
            assert (
                host_bytes(MODELS[model], with_host) <= DEVICES[kind].host_memory_bytes
            )
    assert 4 < 1000e9 / layer_bytes("blockwise", 1, 10**8, 1024) < 5
    traced = training_memory(MODELS["llama-3.1-8b"], Setting(length=131_072, ring=4))
    four, eight = (
        next(row for row in rows("longest") if row[0] == devices)
        for devices in ("4", "8")
    )
    assert f"by plan, {four[1]} and {four[3]} on four and {eight[3]} on eight" in PAGE
    assert f"peaks at {traced.peak_bytes / 1e9:.1f} GB" in PAGE


def test_the_traced_story_equals_result_and_formula():
    path = (
        Path(__file__).parents[2] / "benchmarks" / "results" / "fine-tuning-trace.json"
    )
    stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
    assert len(stages) == 8
    for name, stage in stages.items():
        assert (
            f"| {name} | {stage['peak_bytes'] / 1e9:.1f} | {stage['phase']} |" in PAGE
        )
        assert (
            max(sum(point["bytes"].values()) for point in stage["timeline"])
            == stage["peak_bytes"]
        )
        formula = training_memory(MODELS["llama-3.1-8b"], Setting(**stage["setting"]))
        assert formula.peak_bytes == pytest.approx(stage["peak_bytes"], rel=0.01), name
