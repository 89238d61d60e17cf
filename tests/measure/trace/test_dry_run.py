"""The trace against real steps on real ranks, counted by the C library; the formula against the trace."""

import ctypes
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.names import CATEGORIES, CHECKPOINT_NAMES
from ringspan.measure.trace import tracker
from ringspan.measure.trace.dry_run import (
    fake_mesh,
    hugging_face_config,
    prepare,
    summary,
    thinned,
    trace,
)
from ringspan.plan.cluster.hardware import DEVICES
from ringspan.plan.cost.cost import step_cost
from ringspan.plan.cost.folds import per_token
from ringspan.plan.cost.memory import held_bytes, training_memory
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.configs import MODELS, from_config
from tests.cases import few, long
from tests.every_model.hybrids import hybrid_config
from tests.plan.cost.heap import measured_peaks
from tests.torch import models

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "vocab_size": 501,
    "max_position_embeddings": 8192,
}
HAS_MALLINFO = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")

DTYPES = [
    {"compute_dtype": "float32"},
    {"compute_dtype": "bfloat16"},
    {"compute_dtype": "bfloat16", "parameter_dtype": "bfloat16"},
]
MEASURED = [
    (
        "qwen3",
        {
            "length": 2302,
            "ring": 2,
            "checkpoint": "full",
            "layers_per_checkpoint": 2,
            "compute_dtype": "float32",
        }
        | {"layout": "striped"},
    ),
    *long(
        (
            "llama",
            {
                "length": 900,
                "ring": 1,
                "checkpoint": "none",
                "compute_dtype": "bfloat16",
            },
        ),
        (
            "llama-tied",
            {
                "length": 1500,
                "ring": 2,
                "checkpoint": "none",
                "compute_dtype": "bfloat16",
                "batch": 2,
            },
        ),
        ("qwen3", {"length": 1300, "ring": 1, "checkpoint": "full"} | DTYPES[2]),
        (
            "llama",
            {
                "length": 4004,
                "ring": 4,
                "checkpoint": "attention",
                "compute_dtype": "float32",
            },
        ),
    ),
]


@pytest.mark.skipif(not HAS_MALLINFO, reason="asks glibc's malloc")
@pytest.mark.parametrize(("kind", "options"), MEASURED)
def test_the_traced_peak_is_within_3_percent_of_a_real_run(pool, kind, options):
    config = models.config(kind, **SIZES)
    setting = Setting(**options, loss_chunk_tokens=256, on_gpu=False)
    rank = setting.ring - 1
    heap_bytes, tracked_bytes = pool.run(measured_peaks, setting.ring, config, setting)[
        rank
    ]
    traced = trace(config, setting, rank)
    assert traced.peak.total_bytes == pytest.approx(tracked_bytes, rel=0.001)
    assert traced.peak.total_bytes == pytest.approx(heap_bytes, rel=0.03)


WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1400,
    "vocab_size": 2000,
    "max_position_embeddings": 1 << 20,
}
# Where attention's backward pass is the highest moment; more ranks than key/value heads; many layers that keep.
THIN = {"intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
SHARED = {"intermediate_size": 256}
DEEP = {"num_hidden_layers": 6}
CUT = {"feedforward_chunk_tokens": 512}
BLOCKS = {
    "length": 16_384,
    "ring": 4,
    "loss_chunk_tokens": 4096,
    "loss_chunk_vocabulary": 16_000,
}
ROUTES = [
    "ring",
    "bidirectional",
    "double-ring:2",
    "all-gather",
    "pass-q",
    "ulysses:2",
    "ulysses",
]


@pytest.mark.parametrize(
    ("kind", "changes", "options"),
    [
        *long(("llama", {}, {"length": 32_768, "ring": 4, "checkpoint": "attention"})),
        (
            "llama",
            SHARED,
            {"length": 1024, "ring": 4, "checkpoint": "full", "layout": "contiguous"},
        ),
        *long(
            (
                "llama",
                SHARED,
                {"length": 16_384, "ring": 4, "checkpoint": "full", "route": "ulysses"},
            )
        ),
        (
            "llama",
            DEEP,
            {
                "length": 16_384,
                "ring": 2,
                "offload": "activations",
                "layers_per_checkpoint": 2,
            },
        ),
        *long(
            (
                "llama",
                {},
                {
                    "length": 16_384,
                    "ring": 2,
                    "tp": 2,
                    "checkpoint": "full",
                    "compute_dtype": "float32",
                },
            ),
            (
                "llama",
                {},
                {
                    "length": 32_768,
                    "ring": 4,
                    "checkpoint": "full",
                    "compute_dtype": "float32",
                },
            ),
            (
                "llama",
                {"vocab_size": 64_000},
                {"length": 4096, "ring": 2, "checkpoint": "attention"},
            ),
            ("llama", {}, {"length": 16_384, "ring": 3, "checkpoint": "none"}),
            (
                "llama",
                {"num_key_value_heads": 4},
                {"length": 8192, "checkpoint": "attention", "batch": 2},
            ),
            (
                "qwen3",
                {"head_dim": 64},
                {"length": 16_384, "ring": 2, "replicate": 2, "checkpoint": "full"},
            ),
            (
                "qwen2",
                {},
                {
                    "length": 65_536,
                    "ring": 8,
                    "checkpoint": "attention",
                    "parameter_dtype": "bfloat16",
                },
            ),
            (
                "llama",
                {},
                {"length": 16_384, "ring": 2, "feedforward_chunk_tokens": 1024},
            ),
            ("llama", DEEP, {"length": 16_384, "ring": 2, "offload": "activations"}),
            (
                "qwen3",
                DEEP,
                {"length": 8192, "checkpoint": "full", "offload": "activations"} | CUT,
            ),
            (
                "qwen3",
                {"head_dim": 64},
                {
                    "length": 16_384,
                    "ring": 2,
                    "tp": 2,
                    "feedforward_chunk_tokens": 1024,
                },
            ),
            ("llama", {}, {"length": 16_384, "ring": 2, "tp": 2, "route": "ulysses"}),
            *(
                ("llama", {"vocab_size": 64_000}, {"length": 1024, "ring": 4} | types)
                for types in DTYPES
            ),
            (
                "llama-tied",
                {"vocab_size": 64_000},
                {"length": 1024, "ring": 4, "compute_dtype": "float32"},
            ),
            (
                "llama",
                {"vocab_size": 64_000},
                {"length": 1024, "ring": 4, "optimizer_on_host": True},
            ),
            *(("llama", {"vocab_size": 64_000}, BLOCKS | types) for types in DTYPES),
            *(
                (
                    "llama",
                    THIN,
                    {
                        "length": 65_536,
                        "ring": 8,
                        "compute_dtype": "float32",
                        "comm_dtype": comm_dtype,
                    },
                )
                for comm_dtype in ("exact", "bfloat16", "int8")
            ),
        ),
    ],
)
def test_the_formula_is_within_10_percent_of_the_trace(kind, changes, options):
    config = models.config(kind, **WIDE | changes)
    traced = trace(config, Setting(**options), 0).peak
    formula = training_memory(from_config(config.to_dict(), kind), Setting(**options))
    assert formula.peak_bytes == pytest.approx(traced.total_bytes, rel=0.10)


MIXTURE = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
}


@pytest.mark.parametrize(
    ("slices", "checkpoint"), long((4, "full"), (2, "attention"), (4, "none"))
)
def test_experts_in_slices_are_counted_as_traced(slices, checkpoint):
    config = models.config("qwen3_moe", **WIDE | MIXTURE)
    setting = Setting(length=8192, ring=2, checkpoint=checkpoint, expert_slices=slices)
    shape = from_config(config.to_dict(), "qwen3_moe")
    formula = training_memory(shape, setting).peak_bytes
    assert formula == pytest.approx(
        trace(config, setting, 0).peak.total_bytes, rel=0.05
    )
    assert (
        formula < training_memory(shape, replace(setting, expert_slices=1)).peak_bytes
    )


def held(mesh, config, setting):
    model, _, batch = prepare(
        AutoModelForCausalLM.from_config(config).float(), mesh, setting
    )
    return tracker.held_activations(model, batch)


# Dense; experts; latent keys; experts with windows and sinks; windows; shared keys; chosen keys and shared choices.
KINDS = [
    *long("llama"),
    "mixtral",
    "deepseek_v3",
    *long("gpt_oss", "gemma3_text", "gemma4_text", "glm_moe_dsa"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_keeps_what_is_planned(pool, kind):
    config = models.config(kind, max_position_embeddings=512)
    shape = from_config(config.to_dict(), kind)
    # neither depends on the kind
    others = [("none", 0), ("full", 128)] if kind == "llama" else []
    for policy, norms in (("none", 128), ("attention", 128), *others):
        setting = Setting(
            length=512, ring=2, checkpoint=policy, norm_chunk_tokens=norms, on_gpu=False
        )
        planned = [
            held_bytes(shape, setting) + 4 * setting.tokens
        ] * 2  # with int32 positions, while the decoder runs
        assert pool.run(held, 2, config, setting) == pytest.approx(planned, rel=1e-3)


WIDER = {"deepseek_v4": {"hidden_size": 512}}


# States; convolutions; an index on pools, with n-grams; rotary tables in float32, of which each layer has a copy.
@pytest.mark.parametrize(
    ("kind", "checkpoint", "length", "bound"),
    [
        ("lfm2", "attention", 512, 1e-3),
        *long(
            ("dots3_note_text", "full", 512, 1e-3),
            ("qwen3_next", "attention", 512, 1e-3),
            ("qwen4_exp_text", "full", 512, 1e-3),
            # It also keeps 16 bytes of a token, of rotary tables, and float32 copies of the last streams' weights.
            *(
                ("deepseek_v4", checkpoint, 256, 4e-3)
                for checkpoint in ("full", "attention")
            ),
        ),
    ],
)
def test_checkpoints_let_go_of_what_is_made_again(
    pool, kind, checkpoint, length, bound
):
    setting = Setting(
        length=length,
        ring=2,
        checkpoint=checkpoint,
        norm_chunk_tokens=128,
        on_gpu=False,
    )
    config = hybrid_config(kind, **WIDER.get(kind, {}))
    planned = (
        held_bytes(from_config(config.to_dict(), kind), setting) + 4 * setting.tokens
    )
    # The last rank's chunks lie side by side: one state less.
    assert max(pool.run(held, 2, config, setting)) == pytest.approx(planned, rel=bound)


def held_in_folds(mesh, kind, setting):
    model, _, batch = prepare(
        models.build(kind, max_position_embeddings=8192), mesh, setting
    )
    watching = tracker.MemoryTracker()
    model(**batch).loss.backward()  # FSDP makes its buffers
    with watching:
        loss = model(**batch).loss
        watching.keep()
    loss.backward()
    return watching.moments[-1].bytes["activations"]


@pytest.mark.parametrize("kind", [*long("llama"), "deepseek_v3", *long("gemma3_text")])
def test_folds_keep_what_is_planned_between_passes(pool, kind):
    shape = from_config(models.config(kind).to_dict(), kind)
    checkpoint = "attention" if kind == "deepseek_v3" else "full"
    setting = Setting(length=512, ring=2, folds=4, checkpoint=checkpoint, on_gpu=False)
    each = per_token(shape.counted(shape.layers), setting)  # gradients come later
    planned = setting.fold.tokens * (3 * each.keys + 4 * each.results)
    assert pool.run(held_in_folds, 2, kind, setting) == pytest.approx(
        [planned] * 2, rel=1e-3
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpoint", "offload"), [("full", "activations"), ("attention", "none")]
)
def test_longer_sequences_in_more_folds_are_planned(checkpoint, offload):
    config = models.config("llama", **WIDE | THIN | {"num_hidden_layers": 1})
    # Two folds with float32 gradients are at hand at once, from five on.
    fewer, more = (
        Setting(
            length=4096 * n, ring=2, folds=n, checkpoint=checkpoint, offload=offload
        )
        for n in (5, 6)
    )
    shape = from_config(config.to_dict(), "llama")
    before, formula = (
        training_memory(shape, each).peak_bytes for each in (fewer, more)
    )
    assert formula == pytest.approx(trace(config, more, 0).peak.total_bytes, rel=0.01)
    batch = 24 * (more.tokens - fewer.tokens)  # three int64 a token
    assert (formula <= before + batch) == (offload == "activations")


@pytest.mark.parametrize("route", ["ring", *long("ulysses:4+all-gather", *ROUTES[1:])])
def test_what_the_loop_holds_is_counted_to_a_percent(route):
    """Where nothing else comes near it."""
    setting = Setting(
        length=32_768, ring=8, checkpoint="full", route=route, norm_chunk_tokens=1024
    )
    config = models.config("llama", **WIDE | THIN)
    traced = trace(config, setting, 0).peak
    formula = training_memory(from_config(config.to_dict(), "llama"), setting)
    assert formula.moment == "attention backward"
    assert formula.peak_bytes == pytest.approx(traced.total_bytes, rel=0.002)


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpoint", "layers", "each"), [("attention", 5, 3), ("full", 8, 4)]
)
def test_what_segments_of_layers_keep_is_counted_to_a_percent(checkpoint, layers, each):
    setting = Setting(length=32_768, ring=2, checkpoint=checkpoint)
    segments = replace(setting, layers_per_checkpoint=each)
    config = models.config("llama", **WIDE | {"num_hidden_layers": layers})
    shape = from_config(config.to_dict(), "llama")
    formula, traced = (
        training_memory(shape, segments).peak_bytes,
        trace(config, segments, 0).peak.total_bytes,
    )
    assert formula < training_memory(shape, setting).peak_bytes
    assert formula == pytest.approx(traced, rel=0.002)


@pytest.mark.parametrize(
    ("vocabulary", "checkpoint"),
    few(zip((501, 502, 501), CHECKPOINT_NAMES, strict=True), 3),
)
def test_tensor_parallel_sums_are_those_of_the_step(
    monkeypatch, checkpoint, vocabulary
):
    """A sum over two ranks brings each as many bytes as it has. A vocabulary that is not split needs none."""
    setting = Setting(length=256, ring=2, tp=2, checkpoint=checkpoint)
    config = models.config("llama", **SIZES | {"vocab_size": vocabulary})
    summed, sum_up = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        # Hidden states of the step that is kept, not what the loss adds up of each token.
        if tensor.ndim == 3 and tensor.shape[1] == setting.tokens:
            summed.append(tensor.nbytes)
        return sum_up(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counted)
    trace(config, setting)
    device = DEVICES["h100-80gb"]
    cost = step_cost(from_config(config.to_dict(), "llama"), setting, device, 1)
    assert cost.tensor_bytes == sum(summed)


class Received(TorchDispatchMode):
    """Bytes of gathered weights and reduced gradients that come from the other one of two ranks."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in (
            "c10d::_allgather_base_",
            "c10d::_reduce_scatter_base_",
        ):
            self.num_bytes += (
                max(x.nbytes for x in args if isinstance(x, torch.Tensor)) // 2
            )
        return func(*args, **(kwargs or {}))


def received_in_a_step(mesh, config, setting):
    model, _, batch = prepare(AutoModelForCausalLM.from_config(config), mesh, setting)
    with Received() as received:
        model(**batch).loss.backward()
    return received.num_bytes


@pytest.mark.parametrize("folds", [*long(1), 3])
def test_weights_are_gathered_as_often_as_planned(pool, folds):
    """By each fold, layer by layer: a layer's are sharded again when it is done."""
    setting = Setting(length=48, ring=2, folds=folds)
    config = models.config("llama", **SIZES | DEEP | {"vocab_size": 502})
    shape = from_config(config.to_dict(), "llama")
    planned = step_cost(shape, setting, DEVICES["h100-80gb"], 1).shard_bytes
    assert pool.run(received_in_a_step, 2, config, setting) == [planned] * 2


def test_what_dtensor_makes_to_foresee_shapes_is_not_counted():
    with fake_mesh(Setting(length=256, ring=2), 0, "cpu") as mesh, FakeTensorMode():
        x = DTensor.from_local(torch.empty(101, 7), mesh["ring"], [Shard(0)])
        with tracker.MemoryTracker(is_fake=True) as counted:
            held = torch._foreach_mul([x], 2.0), x * 3
    assert len(held) == 2 and counted.peak.total_bytes == 2 * x.to_local().nbytes


@pytest.mark.long
def test_a_trace_includes_the_buffers_of_the_ring(monkeypatch):
    config = models.config("llama", **WIDE | {"intermediate_size": 256})
    setting = Setting(length=32_768, ring=4, checkpoint="full")
    inside = trace(config, setting).peak.total_bytes
    monkeypatch.setattr(tracker, "_LOOPS", {})
    assert trace(config, setting).peak.total_bytes < 0.9 * inside


def test_the_timeline_has_all_phases_and_names_what_is_held():
    setting = Setting(length=1024, ring=4)
    traced = trace(models.config("llama", **SIZES), setting, 3)
    assert traced.rank == 3
    assert [m.phase for m in thinned(traced.moments, 50)] == sorted(
        (m.phase for m in thinned(traced.moments, 50)),
        key=["forward", "backward", "optimizer"].index,
    )
    shown = summary(traced, budget_bytes=traced.peak.total_bytes - 1)
    assert (
        shown["fits"] is False
        and tuple(shown["bytes"]) == CATEGORIES == tracker.CATEGORIES
    )
    assert sum(shown["bytes"].values()) == shown["peak_bytes"]
    assert (
        max(sum(point["bytes"].values()) for point in shown["timeline"])
        == shown["peak_bytes"]
    )
    parameters = models.build("llama", **SIZES).num_parameters()
    assert shown["bytes"]["parameters"] == pytest.approx(4 * parameters / 4, rel=0.01)
    assert shown["bytes"]["optimizer"] == pytest.approx(8 * parameters / 4, rel=0.01)


def test_what_cannot_be_traced_is_refused():
    with pytest.raises(ConfigError, match="there are 4 ranks, 0 to 3"):
        trace(models.config("llama"), Setting(length=64, ring=4), 4)
    with pytest.raises(UnsupportedError, match="gpt2 has 1,024 learned positions"):
        hugging_face_config(MODELS["gpt2"], 2048)
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"])
def test_the_config_of_a_shape_has_that_shape(name):
    config = hugging_face_config(MODELS[name], 4096)
    assert from_config(config.to_dict(), name).parameters == MODELS[name].parameters
