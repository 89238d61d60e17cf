"""The rehearsal of a rank against the trace, and its prediction of waits."""

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.measure.trace import rehearsal
from ringspan.measure.trace.dry_run import trace
from ringspan.measure.trace.rehearsal import exposed_seconds, rehearse
from ringspan.plan.cost.setting import Setting
from ringspan.torch.engine.attention.part import Coming
from ringspan.torch.engine.transport import protocol
from ringspan.torch.engine.transport.exchange import COUNTERS
from tests.torch import models

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "vocab_size": 501,
    "max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


CASES = [
    (
        "llama",
        {
            "length": 1501,
            "ring": 3,
            "checkpoint": "attention",
            "compute_dtype": "float32",
        },
    ),
    (
        "qwen3",
        {
            "length": 1200,
            "ring": 2,
            "checkpoint": "full",
            "compute_dtype": "float32",
            "layout": "striped",
        },
    ),
    (
        "llama",
        {
            "length": 700,
            "ring": 1,
            "checkpoint": "none",
            "compute_dtype": "float32",
            "batch": 2,
        },
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_peak_is_that_of_the_trace(kind, options):
    config = models.config(kind, **SIZES)
    setting = Setting(**options, loss_chunk_tokens=256, on_gpu=False)
    rank = setting.ring - 1
    measured = rehearse(config, setting, rank, bandwidth=1e9)
    traced = trace(config, setting, rank).peak.total_bytes
    assert measured.peak_bytes == pytest.approx(traced, rel=0.04)
    assert sum(measured.bytes.values()) == pytest.approx(traced, rel=0.001)
    assert len(measured.layer_seconds) == config.num_hidden_layers
    assert 0 < sum(map(sum, measured.layer_seconds)) < measured.step_seconds
    assert (
        not dist.is_initialized()
        and not protocol._registered
        and COUNTERS.transfers is None
    )


@pytest.mark.long
def test_another_rank_of_the_same_mesh_has_groups_of_its_own():
    """DTensor remembers what it worked out by the mesh, and one mesh is like the other to it."""
    config, setting = (
        models.config("llama", **SIZES),
        Setting(length=64, ring=2, tp=2, route="ulysses", on_gpu=False),
    )
    trace(config, setting, 0)
    assert rehearse(config, setting, 2, bandwidth=1e9).rank == 2


def test_blocks_that_arrive_are_normal_numbers_of_the_right_size(monkeypatch):
    arrived, wait = [], Coming.wait

    def looking(coming):
        block = wait(coming)
        if coming.receive:
            message = block.buffer
            arrived.append(
                (message.numel(), float(message.mean()), float(message.std()))
            )
        return block

    monkeypatch.setattr(Coming, "wait", looking)
    config = models.config("llama", **SIZES | {"num_hidden_layers": 1})
    rehearse(
        config,
        Setting(length=96, ring=3, compute_dtype="float32", on_gpu=False),
        1,
        bandwidth=1e9,
    )
    block = (
        32
        * config.num_key_value_heads
        * 2
        * config.hidden_size
        // config.num_attention_heads
    )
    assert arrived and sum(size for size, *_ in arrived) % (block // 2) == 0
    assert all(abs(mean) < 0.2 and 0.8 < std < 1.2 for _, mean, std in arrived)


def test_a_slower_link_exposes_more():
    config = models.config("llama", **SIZES | {"num_hidden_layers": 1})
    setting = Setting(length=96, ring=3, compute_dtype="float32", on_gpu=False)
    measured = rehearse(config, setting, 0, bandwidth=1e3)
    sent = (
        2
        * 32
        * 2
        * config.num_key_value_heads
        * 4
        * config.hidden_size
        // config.num_attention_heads
    )
    assert measured.exposed_seconds > sent / 1e3 / 2
    assert rehearse(config, setting, 0, bandwidth=1e15).exposed_seconds < 1e-6


POST, NEED = 0, -1


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], 0.0),
        # one second of travel behind two of computing
        (
            [(0.0, 0, 100), (2.0, 0, NEED)],
            0.0,
        ),
        ([(0.0, 0, 100), (0.25, 0, NEED)], 0.75),
        # one after the other on the link
        (
            [(0.0, 0, 100), (0.0, 1, 100), (1.5, 0, NEED), (1.5, 1, NEED)],
            0.5,
        ),
        # a wait delays what is posted later
        (
            [(0.0, 0, 100), (0.5, 0, NEED), (0.5, 1, 100), (1.0, 1, NEED)],
            1.0,
        ),
        # also on a link that has been idle
        (
            [(0.0, 0, 100), (0.5, 0, NEED), (0.9, 1, 100), (1.0, 1, NEED)],
            1.4,
        ),
        ([(0.0, 0, 0), (0.0, 0, NEED)], 0.0),  # nothing arrives: it only sends
    ],
)
def test_waits_are_those_of_a_link(events, expected):
    assert exposed_seconds(events, bandwidth=100.0) == pytest.approx(expected)


def test_what_cannot_be_rehearsed_is_refused():
    with pytest.raises(rs.ConfigError, match="there are 2 ranks, 0 to 1"):
        rehearse(
            models.config("llama"), Setting(length=64, ring=2, on_gpu=False), 2, 1e9
        )
    with pytest.raises(
        rs.ConfigError, match=r"a rank needs 2\.00 GB and this cpu has 1\.00 GB"
    ):
        rehearsal._refuse_more_than(10**9, 2 * 10**9, "a rank", "this cpu")
