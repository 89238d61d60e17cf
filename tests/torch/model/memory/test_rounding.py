"""Parameters in bfloat16 that take updates which are smaller than their last digit."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ringspan as rs
from ringspan.core.errors import ConfigError
from ringspan.torch.model.memory.adamw import HostAdamW, RoundingAdamW, rounded
from ringspan.train.config.tables import OptimizerConfig
from ringspan.train.job import build_optimizer
from tests.cases import long
from tests.torch.models import build, tokens


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_numbers_go_to_a_neighbour_and_their_mean_is_right():
    x = torch.randn(500, generator=generator(0)) * torch.logspace(-30, 30, 500)
    draws = torch.stack([rounded(x, generator(seed)).double() for seed in range(400)])
    toward_zero = (x.view(torch.int32) & -(1 << 16)).view(torch.float32).double()
    step = torch.nextafter(
        x.bfloat16().abs(), torch.full((500,), torch.inf, dtype=torch.bfloat16)
    ).double()
    unit = (step - x.bfloat16().abs().double()).abs()
    assert bool(((draws - x.double()).abs() < unit).all()), (
        "up or down by less than one unit"
    )
    assert bool((draws.abs() >= toward_zero.abs()).all())
    # The mean of 400 draws, each off by half a unit at most in the root mean square.
    assert bool(((draws.mean(0) - x.double()).abs() < 5 * 0.5 * unit / 400**0.5).all())


def test_what_bfloat16_has_stays():
    x = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, 2.0**-130])
    for seed in range(20):
        assert torch.equal(rounded(x, generator(seed)).float(), x)
    assert bool(rounded(torch.tensor([torch.nan]), generator(0)).isnan())


def trained(kind: str, num_steps: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Ones after so many steps with gradients of 1 at a rate of 1e-4, in all 1e-4 a step."""
    weight = nn.Parameter(torch.ones(4096, dtype=dtype))
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0}
    optimizer: torch.optim.Optimizer
    match kind:
        case "nearest":
            optimizer = torch.optim.AdamW([weight], **options)
        case "stochastic":
            optimizer = RoundingAdamW([weight], **options)
        case _:
            optimizer = HostAdamW([weight], masters=True, **options)
    for _ in range(num_steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach()


def test_small_updates_add_up():
    exact = trained("nearest", 150, torch.float32).mean()
    assert float(trained("nearest", 150).float().mean()) == 1.0, "each is lost"
    found = trained("stochastic", 150).float()
    # Each of 150 steps is off by at most half a unit below 1 (2^-8) in the root mean square, of 4096 weights.
    assert abs(float(found.mean() - exact)) < 5 * 150**0.5 * 2**-9 / 4096**0.5
    assert torch.equal(
        trained("master", 150), trained("nearest", 150, torch.float32).bfloat16()
    )


def test_float32_parameters_are_stepped_as_by_adamw():
    assert torch.equal(
        trained("stochastic", 9, torch.float32), trained("nearest", 9, torch.float32)
    )


def run(mesh: DeviceMesh, settings: dict[str, Any], reload_after: int) -> list[Tensor]:
    model: Any = rs.parallelize(build("llama-tied").to(torch.bfloat16), mesh)
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-3, **settings))
    ids = tokens(1, 24)
    for step in range(3):
        if step == reload_after:
            saved = get_optimizer_state_dict(model, optimizer)
            optimizer = build_optimizer(
                model, OptimizerConfig(learning_rate=1e-3, **settings)
            )
            set_optimizer_state_dict(model, optimizer, saved)
        model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [
        value
        for p in model.parameters()
        for name, value in optimizer.state[p].items()
        if name != "step"
    ]
    assert all(value.dtype == torch.float32 for value in state)
    return [
        p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for p in model.parameters()
    ]


@pytest.mark.parametrize(
    "settings",
    [{"rounding": "stochastic"}, *long({"rounding": "master", "on_host": True})],
)
def test_replicas_round_equally_and_a_resumed_run_like_the_first(
    pool: Any, settings: dict[str, Any]
):
    first, *others = pool.run(run, 4, settings, -1, replicate=2)
    resumed, *_ = pool.run(run, 4, settings, 1, replicate=2)
    for other in (*others, resumed):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rounding": "master"},
            r'optimizer\.rounding = "master": float32 copies on the device',
        ),
        ({"rounding": "stochastic", "on_host": True}, r"is done on the device"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(**settings)


def test_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match="float16 cannot be rounded at random"):
        RoundingAdamW([nn.Parameter(torch.ones(2, dtype=torch.float16))])
