"""Weights that are NaN or infinite are named on every rank; what only looks like it is taken."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.torch.model.weights.loading import refuse_not_finite
from tests.torch.models import build

NAN, INF = torch.nan, torch.inf
ROWS = torch.full((3, 8), 6e4)  # whose sum no float16 holds


@pytest.mark.parametrize(
    ("weight", "count"),
    [
        (ROWS.half(), 0),
        (torch.tensor([1.0, -INF]), 0),  # a mask
        (torch.tensor([0, 1 << 40]), 0),
        (torch.empty(4, device="meta"), 0),
        (torch.tensor([[1.0, -INF]]), 1),
        (torch.tensor([INF, -INF]), 1),
        (torch.tensor([[NAN, 1, INF]]).half(), 2),
        (torch.tensor([[NAN, 1]]).to(torch.float8_e4m3fn), 1),
    ],
    ids=str,
)
def test_what_is_no_number_is_counted(weight, count):
    if not count:
        refuse_not_finite([("weight", weight)])
        return
    with pytest.raises(
        rs.ConfigError,
        match=f"^weight has {count} numbers that are NaN or infinite; take",
    ):
        refuse_not_finite([("weight", weight)])


def named(mesh: Any, folder: str, name: str, is_read: bool) -> str:
    """Why a model does not go onto the ring whose weight has a NaN, on the first rank or in the files; that of another
    rank is not used.
    """
    # whose bias of the router is a buffer
    kind = "deepseek_v3" if name.endswith("bias") else "llama"
    model = build(kind)
    model.state_dict()[name].view(-1)[-1] = NAN
    if mesh.get_rank() == 0 and is_read:
        model.save_pretrained(folder)
    torch.distributed.barrier(mesh["ring"].get_group())
    plain = build(kind) if mesh.get_rank() else model
    with pytest.raises(rs.ConfigError) as raised:
        rs.from_pretrained(folder, mesh) if is_read else rs.parallelize(plain, mesh)
    if not is_read and name != "lm_head.weight":
        other = model if mesh.get_rank() else build(kind)
        assert all(
            p.isfinite().all()
            for p in rs.parallelize(other, mesh).state_dict().values()
        )
    return str(raised.value)


@pytest.mark.parametrize(
    "is_read", [False, True], ids=["parallelize", "from_pretrained"]
)
@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ],
)
def test_a_weight_that_is_no_number_is_named_on_every_rank(
    pool, tmp_path: Path, name, is_read
):
    for says in pool.run(named, 2, str(tmp_path / "model"), name, is_read):
        assert says.startswith(f"{name} has 1 numbers")
