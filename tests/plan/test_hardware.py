import pytest

from ringspan.core.errors import ConfigError
from ringspan.plan.hardware import DEVICES, device, min_block_tokens, min_tokens_per_device


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
def test_minimal_sizes_are_the_published_ones(name, bandwidth, block_thousands, tokens_thousands):
    block = min_block_tokens(DEVICES[name].flops, getattr(DEVICES[name], bandwidth))
    assert round(block / 1000, 1) == block_thousands
    assert round(min_tokens_per_device(block) / 1000, 1) == tokens_thousands


def test_names_may_be_written_as_people_write_them():
    assert device("H100_80GB") is not None and device(" a100-80gb ").name == "a100-80gb"
    assert device("H100_80GB") == DEVICES["h100-80gb"]


def test_a_device_by_hand_and_a_changed_one():
    by_hand = device("flops=2e12,memory_bytes=16e9,intra_node_bandwidth=1e10")
    assert (by_hand.flops, by_hand.memory_bytes, by_hand.bandwidth(1000)) == (2e12, 16_000_000_000, 1e10)
    slow = device("h100-80gb,inter_node_bandwidth=25e9,devices_per_node=4")
    assert slow.bandwidth(4) == DEVICES["h100-80gb"].intra_node_bandwidth
    assert slow.bandwidth(5) == 25e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h1000", "did you mean h100-80gb"),
        ("quantum", "known are a100-40gb"),
        ("flops=1e12", "also needs memory_bytes, intra_node_bandwidth"),
        ("flops=fast,memory_bytes=1,intra_node_bandwidth=1", "flops='fast'"),
        ("flops=-1,memory_bytes=1,intra_node_bandwidth=1", "positive number"),
        ("h100-80gb,memory=1e9", "did you mean memory_bytes"),
    ],
)
def test_what_is_no_device_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        device(text)
