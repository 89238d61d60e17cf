"""What a plan gives to paste is what the trainer and ``parallelize`` accept, and means the plan's setting."""

import inspect
import math
import shlex
import types
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
import torch

import ringspan as rs
from ringspan.core.arguments import FREE_CHUNK_TOKENS
from ringspan.core.errors import RingspanError
from ringspan.core.names import COMM_DTYPE_NAMES
from ringspan.core.step_config import StepConfig
from ringspan.plan.cluster.hardware import device
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.configs import MODELS, from_config
from ringspan.plan.planner import make_plan
from ringspan.plan.search import Question, layouts, meshes, policies, routes
from ringspan.plan.snippet import python_call, toml_tables, train_command
from ringspan.torch.model.memory.adamw import HostAdamW
from ringspan.torch.model.view import view_of
from ringspan.torch.model.weights.loading import auto_class
from ringspan.torch.parts import check_options
from ringspan.train.config.load import load_config
from tests.cases import long
from tests.every_model.hybrids import hybrid_config
from tests.torch.models import config

MINIMAL = (
    '[model]\npath = "a-model"\n[data]\npaths = ["text"]\nsequence_length_tokens = 2\n'
)
SETTINGS = {
    "plain": Setting(length=4096, checkpoint="none", feedforward_chunk_tokens=0),
    "ring": Setting(length=1 << 20, ring=8, route="bidirectional", feedforward_chunk_tokens=FREE_CHUNK_TOKENS),
    "chunks without a checkpoint": Setting(length=8192, ring=8, checkpoint="none", feedforward_chunk_tokens=4096),
    "whole feed-forwards": Setting(length=8192, ring=2, tp=4, compute_dtype="float32", feedforward_chunk_tokens=0),
    "everything": Setting(
        length=1 << 22, ring=2, replicate=2, tp=2, batch=3, layout="contiguous", route="ulysses:2", checkpoint="full",
        layers_per_checkpoint=4, offload="activations", optimizer_on_host=True,
    ),
}  # fmt: skip


def question_for(setting, **changes):
    asked = {
        "devices": setting.devices,
        "length": setting.length,
        "batch": 2 * setting.replicate * setting.batch,
    }
    asked |= {
        "shape": MODELS["llama-3.1-8b"],
        "device": device("h100"),
        "dtype": setting.compute_dtype,
    }
    return Question(**asked | changes)


def loaded(folder, question, setting):
    """The configuration that the tables give with the least of [model] and [data], started as the plan says."""
    path = folder / "run.toml"
    path.write_text(f"{MINIMAL}\n{toml_tables(question, setting)}\n")
    words = shlex.split(
        train_command(question, setting, "run.toml").replace("\\\n", "")
    )
    return load_config(path, [word for word in words if "=" in word]), words


def check(folder, question, setting):
    config, words = loaded(folder, question, setting)
    assert (
        config.data.sequence_length_tokens == setting.length
        and config.model.dtype == setting.compute_dtype
    )
    assert config.resolve_mesh(question.devices) == (setting.replicate, setting.ring)
    assert (config.mesh.tp, config.attention.layout, config.attention.route) == (
        setting.tp,
        setting.layout,
        setting.route,
    )
    memory, optimizer = config.memory, config.optimizer
    assert memory.checkpoint == setting.checkpoint and memory.offload == setting.offload
    assert (
        1 if memory.layers_per_checkpoint == "auto" else memory.layers_per_checkpoint
    ) == (setting.layers_per_checkpoint)
    chunk = memory.feedforward_chunk_tokens
    assert (
        replace(setting, feedforward_chunk_tokens=chunk).feedforward_tokens
        == setting.feedforward_tokens
    )
    assert optimizer.on_host == setting.optimizer_on_host
    sequences = optimizer.batch_size * optimizer.accumulation_steps * setting.replicate
    assert sequences == question.batch and optimizer.batch_size == setting.batch
    processes = int(words[words.index("--nproc") + 1]) if "--nproc" in words else 0
    assert processes in (0, question.devices)


def run(setting):
    """What the lines in Python call, by the name of the function."""
    calls = {}

    def record(name):
        signature = inspect.signature(getattr(rs, name))

        def call(*args, **kwargs):
            # TypeError for a keyword that the function does not have
            signature.bind(*args, **kwargs)
            calls[name] = kwargs
            return name

        return call

    code = python_call(setting).replace("import ringspan as rs\n", "")
    rings = types.SimpleNamespace(
        **{name: record(name) for name in ("init_mesh", "parallelize", "shard_batch")}
    )
    values = {"rs": rings, "model": torch.nn.Linear(1, 1), "batch": {}}
    made = []
    rings.HostAdamW = HostAdamW
    exec(
        code.replace("rs.HostAdamW(model.parameters())", "made.append(rs.HostAdamW)"),
        values | {"made": made},
    )
    return calls, made


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_tables_load_and_mean_the_setting(tmp_path, setting):
    check(tmp_path, question_for(setting), setting)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_call_has_only_parameters_that_there_are(setting):
    calls, made = run(setting)
    assert calls["init_mesh"] == {
        axis: size
        for axis, size in (
            ("ring", setting.ring),
            ("replicate", setting.replicate),
            ("tp", setting.tp),
        )
        if axis == "ring" or size > 1
    }
    options = calls["parallelize"]
    assert options["layout"] == calls["shard_batch"]["layout"] == setting.layout
    assert (
        options["route"] == setting.route
        and options["checkpoint"] == setting.checkpoint
    )
    assert options["compute_dtype"] == getattr(torch, setting.compute_dtype)
    assert options.get("offload", "none") == setting.offload
    assert options.get("layers_per_checkpoint", 1) == setting.layers_per_checkpoint
    assert made == ([rs.HostAdamW] if setting.optimizer_on_host else [])


@pytest.mark.parametrize(
    ("devices", "length", "batch"),
    [
        (8, 131_072, 1),
        (8, 1 << 22, 1),
        (16, 8192, 64),
        (1, 4096, 2),
        *long((8, 1 << 24, 1)),
    ],
)
def test_what_is_planned_can_be_run(tmp_path, devices, length, batch):
    plan = make_plan(
        Question(
            shape=MODELS["llama-3.2-1b"],
            device=device("a100-40gb"),
            devices=devices,
            length=length,
            batch=batch,
        )
    )
    check(tmp_path, plan.question, plan.setting)
    run(plan.setting)
    longest = replace(plan.question, length=plan.longest.length)
    check(tmp_path, longest, plan.longest)


class Axis:
    """An axis of a mesh, or one of several axes, as far as checks ask."""

    device_type = "cpu"

    def __init__(self, **sizes):
        self.sizes, self.mesh_dim_names = sizes, tuple(sizes)

    def __getitem__(self, name):
        return Axis(**{name: self.sizes[name]})

    def get_group(self, name=None):
        return self[name] if name else self

    def size(self):
        return math.prod(self.sizes.values())


def asked(shape, devices):
    """The questions of a grid of options, and a message for each that cannot be planned."""
    routes = (
        "auto",
        "ring",
        "bidirectional",
        "double-ring:2",
        "all-gather",
        "pass-q",
        "ulysses",
        "ulysses:2+all-gather",
    )
    for route, comm_dtype, folds in product(routes, COMM_DTYPE_NAMES, (1, 2, 8)):
        with suppress(RingspanError):
            question = Question(
                shape=shape,
                device=device("h100"),
                devices=devices,
                length=4096,
                batch=devices,
                route=route,
                comm_dtype=comm_dtype,
                folds=folds,
            )
            meshes(question)
            yield question


def settings_of(question):
    """Every mesh, route and layout that a plan considers, and of plans that choose the route every policy."""
    every = policies(question)
    for mesh in meshes(question):
        ways = [
            replace(mesh, route=r, layout=y)
            for r, y in product(routes(question, mesh), layouts(mesh.ring))
        ]
        yield from (replace(way, **every[0]) for way in ways)
        yield from (
            replace(ways[0], **policy)
            for policy in (every if question.route == "auto" else every[-1:])
        )


@pytest.mark.parametrize(
    "kind", [*long("llama"), "gemma3", "glm_moe_dsa", *long("qwen3_next")]
)
def test_parallelize_takes_every_call_of_the_grid(kind):
    made = hybrid_config(kind) if kind == "qwen3_next" else config(kind)
    with torch.device("meta"):
        view = view_of(auto_class(made).from_config(made))
    shape = from_config(made.to_dict(), kind)
    tried = set()
    for question in asked(shape, 8):
        for setting in settings_of(question):
            if (text := python_call(setting)) in tried:
                continue
            tried.add(text)
            calls, _ = run(setting)
            options = calls["parallelize"] | {"compute_dtype": setting.compute_dtype}
            check_options(
                view,
                Axis(**{"tp": 1, "replicate": 1} | calls["init_mesh"]),
                StepConfig(**options),
            )
    assert len(tried) > 20


@pytest.mark.parametrize(
    ("devices", "nodes"),
    [
        (8, ""),
        (16, "--nnodes 2 --nproc-per-node 8"),
        (12, "--nnodes 2 --nproc-per-node 6"),
        (11, "--nnodes 11 --nproc-per-node 1"),
    ],
)
def test_processes_are_spread_evenly_over_the_nodes(devices, nodes):
    setting = Setting(length=4096, ring=devices)
    command = train_command(question_for(setting), setting, "run.toml")
    assert nodes in command and ("torchrun" in command) == bool(nodes)
    assert all(len(line) <= 80 for line in command.splitlines())
