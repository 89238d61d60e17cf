"""AdamW with its moments elsewhere is AdamW."""

import importlib.util
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ringspan as rs
from ringspan.core.errors import ConfigError
from ringspan.train.config.tables import OptimizerConfig
from ringspan.train.optimizer import build_optimizer, set_learning_rate
from tests.torch.models import build, relative, tokens

RATES = (3e-2, 1e-2, 2e-2)


def run(mesh: DeviceMesh, changes: dict[str, Any], reload_after: int) -> Any:
    model = rs.parallelize(build("llama-tied"), mesh)
    settings = OptimizerConfig(**changes)
    optimizer = build_optimizer(model, settings)
    ids = tokens(1, 24)
    for step, rate in enumerate(RATES):
        if step == reload_after:
            saved = get_optimizer_state_dict(model, optimizer)
            moments = [v for s in saved["state"].values() for k, v in s.items() if k != "step"]
            assert moments and all(isinstance(moment, DTensor) for moment in moments)
            optimizer = build_optimizer(model, settings)
            set_optimizer_state_dict(model, optimizer, saved)
        set_learning_rate(optimizer, rate)
        model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_moments_on_the_host_give_the_same_weights(pool):
    for plain, on_host in zip(
        pool.run(run, 2, {}, -1), pool.run(run, 2, {"on_host": True, "weight_decay": 0.1}, 2), strict=True
    ):
        for name, weight in plain.items():
            assert relative(on_host[name], weight) < 1e-6, name


def test_moments_in_8_bits_need_a_package():
    if importlib.util.find_spec("torchao") is not None:
        pytest.skip("torchao is installed")
    with pytest.raises(ConfigError, match="pip install torchao"):
        build_optimizer(build("llama"), OptimizerConfig(state="8bit"))


def test_moments_in_8_bits_are_near():
    pytest.importorskip("torchao")
    weights = []
    for state in ("float32", "8bit"):
        model = build("llama", hidden_size=64, intermediate_size=256)
        optimizer = build_optimizer(model, OptimizerConfig(state=state, learning_rate=1e-2))
        ids = tokens(1, 24)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat(
        [p.detach().flatten() for p in build("llama", hidden_size=64, intermediate_size=256).parameters()]
    )
    assert relative(weights[1] - start, weights[0] - start) < 0.1
