"""AdamW with its moments elsewhere is AdamW."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ringspan as rs
from ringspan.checkpoints.checkpoint import Checkpoints
from ringspan.checkpoints.state import load_state, run_state
from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.train.config.tables import OptimizerConfig
from ringspan.train.job import build_optimizer, set_learning_rate
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
            moments = [
                v for s in saved["state"].values() for k, v in s.items() if k != "step"
            ]
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
        pool.run(run, 2, {}, -1),
        pool.run(run, 2, {"on_host": True, "weight_decay": 0.1}, 2),
        strict=True,
    ):
        for name, weight in plain.items():
            assert relative(on_host[name], weight) < 1e-6, name


def test_moments_in_8_bits_need_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="pip install torchao"):
        build_optimizer(build("llama"), OptimizerConfig(state="8bit"))


# torchao compiles its step, which takes a minute and says nothing more
@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize(("low", "bound"), [("8bit", 0.02), ("4bit", 0.3)])
def test_moments_in_few_bits_are_near(low, bound):
    pytest.importorskip("torchao")
    weights = []
    for state in ("float32", low):
        model = build("llama", hidden_size=64, intermediate_size=256)
        optimizer = build_optimizer(
            model, OptimizerConfig(state=state, learning_rate=1e-2)
        )
        ids = tokens(1, 24)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat(
        [
            p.detach().flatten()
            for p in build("llama", hidden_size=64, intermediate_size=256).parameters()
        ]
    )
    assert relative(weights[1] - start, weights[0] - start) < bound


def moments_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Any:
    moment = optimizer.state[parameter]["exp_avg"]
    local = moment.to_local() if isinstance(moment, DTensor) else moment
    return torch.empty(local.shape).copy_(local)  # whatever form it is in


@torch.compiler.set_stance("force_eager")  # restoring a state takes a step, too
def saved_in_8_bits(mesh: DeviceMesh, folder: Path) -> tuple[float, float]:
    """How far a moment in 8 bits is from what it was before it was saved and read, and how large."""
    found = []
    for seed in range(2):
        model = rs.parallelize(
            build("llama", hidden_size=64, intermediate_size=256, vocab_size=256), mesh
        )
        optimizer = build_optimizer(
            model, OptimizerConfig(state="8bit", learning_rate=1e-2)
        )
        checkpoints = Checkpoints(folder, run_id="run1", asynchronous=False)
        ids = tokens(1, 24)
        if seed == 0:
            model(
                **rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
            ).loss.backward()
            optimizer.step()
            assert (
                checkpoints.save(
                    1, run_state(model, optimizer), {}, {}, mesh={}, layout="zigzag"
                )
                is None
            )
        else:
            folder_, manifest = checkpoints.find().folder, checkpoints.find().manifest
            assert folder_ is not None and manifest is not None
            checkpoints.load(folder_, manifest, run_state(model, optimizer), None)
            assert float(optimizer.state[model.lm_head.weight]["step"]) == 1
        found.append(moments_of(optimizer, model.lm_head.weight))
        checkpoints.close()
    return relative(found[1], found[0]), float(found[0].norm())


def test_moments_in_8_bits_are_saved_and_read(pool, tmp_path):
    pytest.importorskip("torchao")
    for error, size in pool.run(saved_in_8_bits, 4, tmp_path):
        assert error < 0.02 and size > 0


def saved_with_another(mesh: DeviceMesh, folder: Path) -> list[str]:
    """What loading says in a job of another optimizer, without moments and with."""
    model, found = rs.parallelize(build("llama"), mesh), list[str]()
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.1, momentum=m)
        for name, m in (("no", 0), ("has", 0.9))
    }
    for saving, loading in (("no", "has"), ("has", "no")):
        checkpoints = Checkpoints(folder / saving, run_id="run1", asynchronous=False)
        checkpoints.save(
            1, run_state(model, optimizers[saving]), {}, {}, mesh={}, layout="zigzag"
        )
        saved, other = checkpoints.find(), optimizers[loading]
        assert saved.folder is not None and saved.manifest is not None
        try:
            load_state(
                checkpoints,
                saved.folder,
                saved.manifest,
                run_state(model, other),
                other,
                {},
            )
        except CheckpointError as error:
            found.append(str(error))
        checkpoints.close()
    return found


def test_a_checkpoint_of_another_optimizer_blames_it(pool, tmp_path):
    for lacks, has in pool.run(saved_with_another, 4, tmp_path):
        assert (
            "momentum_buffer; was it saved with another optimizer? set that one again"
            in lacks
        )
        assert (
            "momentum_buffer, which SGD does not keep; it was saved with another optimizer"
            in has
        )
