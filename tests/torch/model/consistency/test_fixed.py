"""What can no longer change once a model is on a ring, and models that no ring can take."""

import copy
import io
import pickle
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import ringspan as rs
from ringspan.torch.model.support import refuse_unsupported
from ringspan.torch.model.tensor_parallel.split import refuse_split
from ringspan.torch.model.view import view_of
from tests.cases import few
from tests.torch.models import build, check, relative, step


def set_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def replace(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach() * 0.5)


# What is done to a model, and what is said of it then, or in the next step.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half": (lambda model: model.half(), "make them torch.float16 before parallelize"),
    "bfloat16": (lambda model: model.bfloat16(), "parallelize(compute_dtype=...)"),
    "double": (lambda model: model.double(), "torch.float64"),
    "to a type": (
        lambda model: model.to(torch.bfloat16),
        "make them torch.bfloat16 before parallelize",
    ),
    "to a device": (lambda model: model.to("meta"), "ring of cpu"),
    "resize": (
        lambda model: model.resize_token_embeddings(120),
        "resize_token_embeddings comes before parallelize",
    ),
    "copy": (copy.deepcopy, "cannot be copied"),
    "shallow copy": (copy.copy, "cannot be pickled; save_pretrained writes the model"),
    "pickle": (pickle.dumps, "cannot be pickled; save_pretrained writes the model"),
    "saved whole": (
        lambda model: torch.save(model, io.BytesIO()),
        "torch.save of model.state_dict() its shards",
    ),
    "shared memory": (
        lambda model: model.share_memory(),
        "call share_memory before parallelize",
    ),
    "other data": (
        set_data,
        "model.embed_tokens.weight.data was set after parallelize",
    ),
    "from a vector": (
        lambda model: nn.utils.vector_to_parameters(
            torch.zeros(model.num_parameters()), model.parameters()
        ),
        "model.embed_tokens.weight.data was set after parallelize",
    ),
    "replaced": (
        replace,
        "model.layers.1.input_layernorm.weight was replaced after parallelize, and would not be used",
    ),
    "part in half": (
        lambda model: model.model.layers[1].mlp.half(),
        "was replaced after parallelize, and would not be used",
    ),
    "checkpointing": (
        lambda model: model.gradient_checkpointing_enable(),
        "parallelize(checkpoint='attention')",
    ),
    "no checkpointing": (
        lambda model: model.gradient_checkpointing_disable(),
        "parallelize(checkpoint='attention')",
    ),
    "new head": (
        lambda model: setattr(model, "lm_head", nn.Linear(64, 97)),
        "changed after parallelize (lm_head)",
    ),
    "new parameter": (
        lambda model: model.model.layers[1].mlp.register_parameter(
            "extra", nn.Parameter(torch.zeros(3))
        ),
        "changed after parallelize (model.layers.1.mlp)",
    ),
    "wrapped for data parallelism": (
        DistributedDataParallel,
        "ringspan.hf.ring_accelerator",
    ),
}


def changed_afterwards(mesh: DeviceMesh, how: str) -> None:
    model: Any = rs.parallelize(build("llama"), mesh)
    if how in ("replaced", "part in half"):
        step(model, mesh)
    CHANGES[how][0](model)
    step(model, mesh)


@pytest.mark.parametrize("how", few(CHANGES, 2))
def test_what_changes_weights_afterwards_is_refused(pool, how):
    for outcome in pool.outcomes(changed_afterwards, 2, how):
        assert isinstance(outcome, rs.UnsupportedError) and CHANGES[how][1] in str(
            outcome
        )


def written(mesh: DeviceMesh | None) -> Any:
    """What changes weights where they are, between two steps, and calls that change nothing."""
    model: Any = build("llama")
    if mesh:
        rs.parallelize(model, mesh)
    step(model, mesh)
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 0.5)
            parameter.data.mul_(1.5)
    model.load_state_dict(model.state_dict())
    model.load_state_dict(
        {name: x * 0.9 for name, x in model.state_dict().items()}, assign=True
    )
    model.init_weights()
    model.tie_weights()
    model.apply(lambda module: None)
    model.requires_grad_(False).requires_grad_(True)
    model.eval().float().to("cpu").to(torch.float32).train()
    return step(model, mesh)


def test_weights_that_are_written_where_they_are_count(pool):
    loss, gradients = written(None)
    plain = step(build("llama"))
    assert relative(loss, plain[0]) > 1e-4
    check(pool.run(written, 2), (loss, gradients))


def resized(mesh: DeviceMesh | None = None) -> Any:
    model = build("llama")
    model.resize_token_embeddings(120, mean_resizing=False)
    return step(rs.parallelize(model, mesh) if mesh else model, mesh)


def test_embeddings_resized_before_are_as_on_one_process(pool):
    loss, gradients = resized()
    assert gradients["lm_head.weight"].shape == (120, 64)
    check(pool.run(resized, 2), (loss, gradients))


def given(mesh: DeviceMesh, how: str) -> None:
    model: Any = build("llama")
    match how:
        case "ddp":
            model = DistributedDataParallel(model)
        case "sharded":
            fully_shard(model.model.layers[1], mesh=mesh["ring"])
        case "around":
            fully_shard(model, mesh=mesh["ring"])
    rs.parallelize(model, mesh)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("ddp", "model.module"),
        ("sharded", "fully_shard of model.layers.1"),
        ("around", "sharded before"),
    ],
)
def test_a_model_that_somebody_distributed_before_is_refused(pool, how, message):
    for outcome in pool.outcomes(given, 4, how):
        assert isinstance(outcome, rs.UnsupportedError) and message in str(outcome)


UNSPLIT = {
    "max_norm": r"model.embed_tokens has max_norm=1\.0",
    "sparse": "sparse=True",
    "scale_grad_by_freq": "scale_grad_by_freq=True",
    "quantised": "quantised",
    "packed": r"LlamaForCausalLM is quantised \(gptq\), .*model.dequantize\(\), then save_pretrained",
    "of integers": r"q_proj.weight is torch\.int8",
    "own forward": "del model.forward",
    "same memory": "two parameters over the same memory",
}


@pytest.mark.parametrize("how", UNSPLIT)
def test_weights_that_no_ring_can_split_are_refused(how):
    model = build("llama")
    match how:
        case "max_norm" | "sparse" | "scale_grad_by_freq":
            model.set_input_embeddings(
                nn.Embedding(97, 64, **{how: 1.0 if how == "max_norm" else True})
            )
        case "quantised":
            model = quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        case "packed":
            model.is_quantized, model.quantization_method = True, "gptq"
        case "of integers":
            weight = torch.zeros(64, 64, dtype=torch.int8)
            model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(
                weight, requires_grad=False
            )
        case "own forward":
            model.forward = model.forward
        case "same memory":
            model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)
    with pytest.raises(rs.UnsupportedError, match=UNSPLIT[how]):
        refuse_unsupported(view_of(model))


def padded(mesh: DeviceMesh | None = None) -> Any:
    torch.manual_seed(5)
    model = build("llama")
    model.set_input_embeddings(nn.Embedding(97, 64, padding_idx=-92))  # token 5
    return step(rs.parallelize(model, mesh) if mesh else model, mesh)


def test_a_row_that_pads_gets_no_gradient(pool):
    loss, gradients = padded()
    assert not gradients["model.embed_tokens.weight"][5].any()
    check(pool.run(padded, 2), (loss, gradients))


def hooked(mesh: DeviceMesh | None, where: str, after: bool) -> Any:
    """A hook in the middle, before the model is on the ring or after its first step there."""
    model = build("llama")
    if not after:
        hook(model, where)
    if mesh:
        rs.parallelize(model, mesh, feedforward_chunk_tokens=5, norm_chunk_tokens=7)
    if after:
        step(model, mesh)
        model.zero_grad()
        hook(model, where)
    return step(model, mesh)


def hook(model: Any, where: str) -> None:
    module: nn.Module = model.get_submodule(where)
    module.register_forward_pre_hook(
        lambda _, given: (given[0] * 1.5, *given[1:]) if is_float(given) else None
    )
    module.register_forward_hook(
        lambda _, __, out: out * 0.5 if isinstance(out, Tensor) else None
    )
    module.register_full_backward_hook(
        lambda _, d_in, __: tuple(None if d is None else 2.0 * d for d in d_in)
    )


def is_float(given: tuple[Any, ...]) -> bool:
    return bool(given) and isinstance(given[0], Tensor) and given[0].is_floating_point()


PLACES = [
    *(
        "lm_head",
        "model.embed_tokens",
        "model.norm",
        "model.layers.0",
        "model.layers.1.mlp",
    ),
    *(
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.input_layernorm",
    ),
]


@pytest.mark.parametrize(
    ("where", "after"), [*few(zip(PLACES, cycle([False, True])), 3), ("lm_head", True)]
)
def test_hooks_do_what_they_do_on_one_process(pool, where, after):
    loss, gradients = hooked(None, where, after)
    plain = step(build("llama"))
    names = gradients.keys()
    assert relative(loss, plain[0]) > 1e-6 or any(
        relative(gradients[n], plain[1][n]) > 1e-3 for n in names
    )
    check(pool.run(hooked, 2, where, after), (loss, gradients))


@pytest.mark.parametrize("change", ["hook", "parametrization", "own forward"])
def test_projections_that_do_more_are_not_split(change):
    model = build("llama")
    projection = model.model.layers[1].self_attn.o_proj
    match change:
        case "hook":
            projection.register_forward_hook(lambda _, __, out: out)
        case "parametrization":
            parametrizations.weight_norm(projection)
        case "own forward":
            projection.forward = projection.forward
    with pytest.raises(
        rs.UnsupportedError,
        match=r"layers\.1\.self_attn\.o_proj has hooks, a parametrization",
    ):
        refuse_split(model, 2)


def late_hook(mesh: DeviceMesh) -> None:
    model = rs.parallelize(build("llama"), mesh)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _, __, out: out)
    step(model, mesh)


def test_a_hook_on_a_split_projection_is_refused(pool):
    for outcome in pool.outcomes(late_hook, 2, tp=2):
        assert isinstance(
            outcome, rs.UnsupportedError
        ) and "Linear that tp splits has hooks" in str(outcome)


def checkpointed_before(mesh: DeviceMesh, checkpoint: Any) -> Any:
    model = build("llama")
    model.gradient_checkpointing_enable()
    return step(rs.parallelize(model, mesh, checkpoint=checkpoint), mesh)


def test_earlier_checkpointing_is_replaced_or_refused(pool):
    check(pool.run(checkpointed_before, 2, "attention"), step(build("llama")))
    for outcome in pool.outcomes(checkpointed_before, 2, "none"):
        assert isinstance(outcome, rs.ConfigError) and "checkpointing_disable()" in str(
            outcome
        )


def compiled_in_place(mesh: DeviceMesh, after: bool) -> Any:
    model = build("llama", num_hidden_layers=1)
    if not after:
        model.compile(backend="eager")
    rs.parallelize(model, mesh)
    if after:
        model.compile(backend="eager")
    result = step(model, mesh)
    torch.compiler.reset()
    return result


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_model_compiled_in_place_computes_the_same(pool, after):
    check(
        pool.run(compiled_in_place, 1, after), step(build("llama", num_hidden_layers=1))
    )


class BatchNormed(nn.Module):
    """A feed-forward behind a batch norm, which remembers the mean of the tokens that it saw."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(64)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(self.norm(hidden.mT).mT)


def with_buffers(
    mesh: DeviceMesh | None, how: str, checkpoint: str, frozen: bool
) -> Any:
    torch.manual_seed(2)
    model: Any = build("llama")
    layer = model.model.layers[1]
    if how == "batch norm":
        layer.mlp = changing = BatchNormed(layer.mlp)
    else:
        changing = parametrizations.spectral_norm(layer.mlp.up_proj)
    model.train()
    changing.train(not frozen)
    if mesh:
        rs.parallelize(model, mesh, checkpoint=checkpoint)  # pyright: ignore[reportArgumentType]
    return step(model, mesh)


@pytest.mark.parametrize("checkpoint", ["none", "attention"])
@pytest.mark.parametrize(
    ("how", "name"),
    [("batch norm", "mlp.norm.num_batches"), ("spectral norm", "weight.0._u")],
)
def test_layers_that_change_their_buffers_raise(pool, how, name, checkpoint):
    for outcome in pool.outcomes(with_buffers, 2, how, checkpoint, False):
        assert isinstance(outcome, rs.UnsupportedError), outcome
        assert name in str(outcome) and "changed in a forward pass" in str(outcome)


@pytest.mark.parametrize("how", ["batch norm", "spectral norm"])
def test_buffers_that_stay_are_those_of_one_process(pool, how):
    loss, gradients = with_buffers(None, how, "none", True)
    check(pool.run(with_buffers, 2, how, "attention", True), (loss, gradients))
