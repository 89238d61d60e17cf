"""Layers that torch.compile has made programs of: the numbers of eager ones, no graph break, one program for all
lengths.
"""

import shutil
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.torch.engine.attention import op
from tests.cases import long
from tests.pool import Pool
from tests.torch.engine.recurrence.models import build as build_stateful
from tests.torch.models import build, close_by_name, relative, tokens, whole_gradients

DOCUMENTS = [[[10, 30]], [[15, 25]], [[10, 10, 20, 8]], [[41]]]


def batch_of(
    length: int, documents: list[list[int]] | None = None
) -> dict[str, Tensor]:
    ids = tokens(len(documents or [0]), length)
    batch = {"input_ids": ids, "labels": ids}
    if documents:
        batch["position_ids"] = torch.stack(
            [torch.cat([torch.arange(one) for one in row]) for row in documents]
        )
    return batch


def steps(
    mesh: DeviceMesh,
    kind: str,
    batches: list[dict[str, Tensor]],
    options: dict[str, Any],
    changes: dict[str, Any],
    compiler: Any = "aot_eager",  # traces both passes, and generates no code
) -> Any:
    """Of each batch the loss and gradients, eager and compiled, and how often the ring ran forward; then what
    torch.compile did for all of them, and what evaluation and generation give.
    """
    torch.compiler.reset()
    counters.clear()
    models = [
        rs.parallelize(build(kind, **changes), mesh, compile=each, **options)
        for each in (False, compiler)
    ]
    layout, found = options.get("layout", "zigzag"), []
    for batch in batches:
        pair = []
        for model in models:
            model.zero_grad()
            with mock.patch.object(op, "forward", side_effect=op.forward) as ring:
                loss = model(**rs.shard_batch(batch, mesh, layout=layout)).loss
                loss.backward()
            pair.append((loss.detach(), whole_gradients(model), ring.call_count))
        found.append(pair)
    breaks, graphs = (
        sum(counters["graph_break"].values()),
        counters["stats"]["unique_graphs"],
    )
    with torch.no_grad():
        evaluated = [
            model(**rs.shard_batch(batches[0], mesh, layout=layout)).loss
            for model in models
        ]
    asked = {
        "input_ids": batches[0]["input_ids"][:1],
        "max_new_tokens": 3,
        "do_sample": False,
    }
    answers = [model.generate(**asked) for model in models]
    torch.compiler.reset()
    return found, breaks, graphs, evaluated, answers


THREE = {"num_hidden_layers": 3}  # which one program serves


@pytest.mark.parametrize(
    ("kind", "batches", "options", "changes", "graphs"),
    [
        *long(
            ("llama", [batch_of(n) for n in (37, 64, 80)], {}, THREE, 2),
            (
                "llama",
                [batch_of(37)],
                {"checkpoint": "none", "layout": "striped"},
                THREE,
                1,
            ),
        ),
        (
            "llama",
            [batch_of(40, rows) for rows in ([[10, 30], [20, 20]], [[40], [30, 10]])],
            {},
            THREE,
            2,
        ),
        *long(
            ("llama", [batch_of(37)], {"checkpoint": "full"}, THREE, 1),
            (
                "llama",
                [batch_of(sum(rows[0]), rows) for rows in DOCUMENTS],
                {},
                THREE,
                3,
            ),
            (
                "llama",
                [batch_of(sum(rows[0]), rows) for rows in DOCUMENTS[:2]],
                {"layout": "balanced"},
                THREE,
                1,
            ),
        ),
        *long(
            (
                "llama",
                [batch_of(40, [[10, 30], [20, 20]])] * 2,
                {"layout": "balanced", "checkpoint": "none"},
                THREE,
                1,
            ),
            (
                "mistral-window",
                [batch_of(37, [[27, 10]])] * 2,
                {"route": "all-gather"},
                THREE,
                1,
            ),
        ),
        pytest.param(  # layers of two kinds, sinks, experts
            *("gpt_oss", [batch_of(37)], {}, {}, 2),
            marks=[
                pytest.mark.long,
                pytest.mark.skipif(
                    Version(transformers.__version__) < Version("5.23"),
                    reason="experts on a CPU are no program there",
                ),
            ],
        ),
    ],
)
def test_layers_compute_the_same_in_few_programs(
    pool, kind, batches, options, changes, graphs
):
    """Of layers of one kind two programs: for the first length, then for any."""
    check(pool.run(steps, 2, kind, batches, options, changes), graphs)


def check(results: list[Any], graphs: int) -> None:
    """Compiled and eager are alike on every rank, and took no more programs than these."""
    for found, breaks, made, evaluated, answers in results:
        assert breaks == 0
        assert 0 < made <= graphs
        for (loss, gradients, passes), (
            compiled_loss,
            compiled,
            compiled_passes,
        ) in found:
            assert relative(compiled_loss, loss) < 1e-6
            assert compiled_passes == passes, "what is checkpointed keeps what it keeps"
            close_by_name(compiled, gradients)
        assert relative(*evaluated) < 1e-6
        assert torch.equal(*answers)


@pytest.mark.long
@pytest.mark.timeout(900)  # Inductor generates C++ and has it compiled
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="needs a C++ compiler",
)
@pytest.mark.parametrize(
    ("ranks", "kind", "batches"),
    [
        (1, "llama", [batch_of(n) for n in (37, 64)]),
        (2, "llama", [batch_of(n) for n in (37, 64, 80)]),
        (2, "gemma3_text", [batch_of(40, [[10, 30], [20, 20]])] * 2),
    ],
    ids=["one rank", "two ranks", "windows and documents"],
)
def test_what_inductor_generates_computes_the_same(ranks, kind, batches):
    with closing(Pool(ranks, timeout_seconds=600)) as pool:
        check(pool.run(steps, ranks, kind, batches, {}, {}, True), 4)


def under_autocast_with_heads_split(mesh: DeviceMesh) -> Any:
    """Loss and gradients, eager and compiled, in bfloat16."""
    found = []
    for backend in (False, "aot_eager"):
        model = rs.parallelize(build("llama"), mesh, compile=backend)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**rs.shard_batch(batch_of(37), mesh)).loss
        loss.backward()
        found.append((loss.detach(), whole_gradients(model)))
    return found


def test_layers_of_split_heads_under_autocast(pool):
    for (loss, gradients), (compiled_loss, compiled) in pool.run(
        under_autocast_with_heads_split, 2, tp=2
    ):
        assert relative(compiled_loss, loss) < 1e-6
        close_by_name(compiled, gradients)


def refused(mesh: DeviceMesh) -> None:
    with pytest.raises(
        rs.UnsupportedError,
        match="compile=True: Llama4TextModel scales queries by their positions",
    ):
        rs.parallelize(build("llama4_text"), mesh, compile=True)
    with pytest.raises(
        rs.UnsupportedError,
        match="compile=True: Lfm2Model has layers with a state or a convolution",
    ):
        rs.parallelize(
            build_stateful("lfm2", torch.float32),
            mesh,
            compile=True,
            layout="contiguous",
        )
    model = rs.parallelize(build("mixtral"), mesh, compile=True)
    with pytest.raises(
        rs.UnsupportedError,
        match="compiled layers do not show their routers' scores; use compile=Fal",
    ):
        model(**rs.shard_batch(batch_of(37), mesh), output_router_logits=True)


def test_what_no_program_can_do_is_refused(pool):
    pool.run(refused, 2)
