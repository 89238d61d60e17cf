from dataclasses import replace
from pathlib import Path

import pytest

from ringspan.core.errors import ConfigError
from ringspan.plan.cluster.devices import OTHER_NAMES
from ringspan.plan.cluster.hardware import (
    DEVICES,
    _essence,
    device,
    min_block_tokens,
    min_tokens_per_device,
)
from tests.cases import refusals

NAMES = [
    line.split(": ")
    for line in Path(__file__).with_name("names.txt").read_text().splitlines()[1:]
]


@pytest.mark.parametrize(
    ("name", "bandwidth", "block_thousands", "tokens_thousands"),
    [
        # The table of minimal sizes in Liu, Zaharia, Abbeel 2023, whose InfiniBand row is 24.5 and 149.5.
        ("a100-80gb", "intra_node_bandwidth", 1.0, 6.2),
        ("a100-80gb", "inter_node_bandwidth", 25.0, 149.8),
        ("tpu-v3", "intra_node_bandwidth", 1.1, 6.6),
        ("tpu-v4", "intra_node_bandwidth", 1.0, 6.2),
        ("tpu-v5e", "intra_node_bandwidth", 1.1, 6.3),
    ],
)
def test_minimal_sizes_are_the_published_ones(
    name, bandwidth, block_thousands, tokens_thousands
):
    block = min_block_tokens(DEVICES[name].flops, getattr(DEVICES[name], bandwidth))
    assert round(block / 1000, 1) == block_thousands
    assert round(min_tokens_per_device(block) / 1000, 1) == tokens_thousands


@pytest.mark.parametrize(("name", "text"), NAMES)
def test_names_may_be_written_as_people_and_libraries_write_them(name, text):
    for written in text.split(","):
        found = device(written)
        assert found == DEVICES[name], written
        assert not found.note


@pytest.mark.parametrize(
    ("written", "taken", "other"),
    [("A100", "a100-80gb", "a100-40gb"), ("rtx-6000", "rtx-6000-ada", "rtx-pro-6000")],
)
def test_a_name_of_two_devices_is_taken_for_one_and_says_so(written, taken, other):
    found = device(written)
    assert replace(found, note="") == DEVICES[taken]
    assert (
        f"--device {written} is taken as {DEVICES[taken].title}" in found.note
        and other in found.note
    )


def test_a_device_has_its_name_and_title_and_no_others():
    essences = [_essence(name) for name in DEVICES]
    assert len(set(essences)) == len(essences)
    for name, each in DEVICES.items():
        assert device(name) == device(each.title) == each
    for name, (taken, other) in OTHER_NAMES.items():
        assert (
            _essence(name) not in essences
            and taken in DEVICES
            and (not other or other in DEVICES)
        )


@pytest.mark.parametrize("each", DEVICES.values(), ids=DEVICES)
def test_numbers_of_the_table_are_those_of_accelerators(each):
    """A slip of a factor of 1000, or a number in both directions or with sparsity, falls out of these."""
    assert 1e14 < each.flops < 3e15
    assert 15e9 < each.memory_bytes < 300e9
    assert 3e11 <= each.memory_bandwidth <= 8e12
    assert 1 < each.flops / each.memory_bandwidth < 1000, "FLOP per byte of its memory"
    assert (
        1e8
        < each.inter_node_bandwidth
        <= each.intra_node_bandwidth
        <= each.memory_bandwidth
    )
    assert bool(each.host_bandwidth) == bool(each.host_memory_bytes)


def test_a_device_by_hand_and_a_changed_one():
    by_hand = device("flops=2e12,memory_bytes=16e9,intra_node_bandwidth=1e10")
    assert (by_hand.flops, by_hand.memory_bytes, by_hand.bandwidth(1000)) == (
        2e12,
        16_000_000_000,
        1e10,
    )
    slow = device("h100-80gb,inter_node_bandwidth=25e9,devices_per_node=4")
    assert slow.bandwidth(4) == DEVICES["h100-80gb"].intra_node_bandwidth
    assert slow.bandwidth(5) == 25e9
    assert slow.title == "NVIDIA H100 80 GB, changed"
    assert device("h100, memory_bandwidth=3e12").memory_bandwidth == 3e12


@refusals("device")
def test_what_is_no_device_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        device(*arguments)
