"""One rank rehearsed on one device: what arrives, what is compared, and what is refused."""

import json

import pytest
import torch
from typer.testing import CliRunner

import ringspan as rs
from ringspan.cli.main import app
from ringspan.core.schedule.schedule import make_schedule
from ringspan.measure.bench import ring as bench
from ringspan.torch.engine.attention import ring
from ringspan.torch.engine.transport.protocol import FakeTransport

SMALL = bench.RingCase(
    virtual_ranks=4, tokens=24, heads=4, kv_heads=2, head_dim=16, dtype="float32", repeats=1, error_ranks=(1, 3),
    error_tokens=60,
)  # fmt: skip


@pytest.mark.parametrize("mask", ["causal", "window:20", "documents:30,25,41"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_case_is_measured(mask, rank):
    case = bench.replace(SMALL, mask=mask, rank=rank)
    result = bench.run(case)
    assert result["hops"] == len(
        make_schedule(rs.Layout("zigzag", 96, 4), rs.Mask.parse(mask), rank).hops
    )
    assert set(result["seconds"]) == {"ring", "still", "cpu"}
    assert all(result["efficiency"][kind] > 0 for kind in ("forward", "backward"))
    for row, ranks in zip(result["errors"], (1, 3), strict=True):
        assert row["ranks"] == ranks
        assert max(row[name] for name in ("out", "dq", "alone_out", "alone_dq")) < 3e-6


def test_gathered_passes_are_rehearsed():
    result = bench.run(bench.replace(SMALL, route="all-gather", error_ranks=()))
    assert all(result["efficiency"][kind] > 0 for kind in ("forward", "backward"))


def test_the_single_sequence_has_as_many_pairs_as_the_rank():
    one = bench.PlayedRank(bench.replace(SMALL, tokens=512))
    assert 0 <= one.single.num_pairs / one.schedule.num_pairs - 1 < 0.01


def test_what_arrives_is_what_the_ring_would_send():
    """Without the copies the result is another one: the errors above are those of blocks that came by them."""
    case = bench.replace(SMALL, virtual_ranks=3, tokens=20, rank=1)
    one = bench.PlayedRank(case)
    on, off = one.passes(is_moving=True), one.passes(is_moving=False)
    assert torch.equal(on["forward"]()[0], on["forward"]()[0])
    blank = bench.ring_of(case, one.layout, one.q, one.k)
    of_zeros = bench.replace(
        blank, exchange=FakeTransport(bench.Copies(one.device, {}))
    )
    zeros = ring.forward(of_zeros, one.q, one.k, one.v)[0]
    assert (
        not torch.allclose(on["forward"]()[0], zeros)
        and off["forward"]()[0].shape == zeros.shape
    )


def test_the_command_prints_one_object_and_refuses_politely():
    small = [
        "--virtual-ranks",
        "2",
        "--tokens",
        "16",
        "--heads",
        "2",
        "--kv-heads",
        "1",
        "--head-dim",
        "8",
    ]
    small += ["--dtype", "float32", "--repeats", "1", "--error-ranks", ""]
    done = CliRunner().invoke(app, ["bench", "ring", *small, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["errors"] == []
    assert "hops / kernel" in CliRunner().invoke(app, ["bench", "ring", *small]).stdout
    for arguments, message in (
        (["--kernel", "cudnn"], "it needs CUDA tensors"),
        (["--kernel", "abacus"], "unknown kernel 'abacus'"),
        (["--rank", "2"], "there are 2 virtual ranks"),
        (["--error-ranks", "x"], "--error-ranks 'x'"),
    ):
        refused = CliRunner().invoke(app, ["bench", "ring", *small, *arguments])
        assert isinstance(refused.exception, rs.RingspanError) and message in str(
            refused.exception
        )


def test_the_help_has_an_example():
    assert (
        "ringspan bench ring --virtual-ranks 8"
        in CliRunner().invoke(app, ["bench", "ring", "--help"]).stdout
    )
