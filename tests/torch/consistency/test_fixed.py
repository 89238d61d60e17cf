"""What can no longer change once a model is on a ring, and models that no ring can take."""

import copy
import inspect
import io
import pickle
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
from ringspan.torch.tensor_parallel.split import refuse_split
from tests.cases import long
from tests.torch.layers.blockwise.test_head import check, one_step
from tests.torch.models import build, relative, tokens
from tests.torch.test_parallelize import whole_gradients

LENGTH = 37


def step(model: Any, mesh: DeviceMesh | None = None) -> Any:
    ids = tokens(1, LENGTH)
    batch = {"input_ids": ids, "labels": ids}
    loss = model(**(rs.shard_batch(batch, mesh) if mesh else batch)).loss
    loss.backward()
    return loss.detach(), loss.detach(), whole_gradients(model)


def changed_afterwards(mesh: DeviceMesh, how: str) -> None:
    model: Any = rs.parallelize(build("llama"), mesh)
    match how:
        case "half" | "bfloat16" | "double":
            getattr(model, how)()
        case "to a type":
            model.to(torch.bfloat16)
        case "to a device":
            model.to("meta")
        case "resize":
            model.resize_token_embeddings(120)
        case "copy":
            copy.deepcopy(model)
        case "shallow copy":
            copy.copy(model)
        case "pickle":
            pickle.dumps(model)
        case "saved whole":
            torch.save(model, io.BytesIO())
        case "shared memory":
            model.share_memory()
        case "other data":
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
            step(model, mesh)
        case "from a vector":
            numbers = torch.zeros(model.num_parameters())
            nn.utils.vector_to_parameters(numbers, model.parameters())
            step(model, mesh)
        case "replaced":
            step(model, mesh)
            norm = model.model.layers[1].input_layernorm
            norm.weight = nn.Parameter(norm.weight.detach() * 0.5)
            step(model, mesh)
        case "part in half":
            step(model, mesh)
            model.model.layers[1].mlp.half()
            step(model, mesh)
        case "checkpointing":
            model.gradient_checkpointing_enable()
        case "no checkpointing":
            model.gradient_checkpointing_disable()
        case "new head":
            model.lm_head = nn.Linear(64, 97)
            step(model, mesh)
        case "new parameter":
            model.model.layers[1].mlp.register_parameter("extra", nn.Parameter(torch.zeros(3)))
            step(model, mesh)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("half", "make them torch.float16 before parallelize"),
        ("bfloat16", "parallelize(compute_dtype=...)"),
        ("double", "torch.float64"),
        ("to a type", "make them torch.bfloat16 before parallelize"),
        ("to a device", "ring of cpu"),
        ("resize", "resize_token_embeddings comes before parallelize"),
        ("copy", "cannot be copied"),
        ("shallow copy", "cannot be pickled; save_pretrained writes the model"),
        ("pickle", "cannot be pickled; save_pretrained writes the model"),
        ("saved whole", "torch.save of model.state_dict() its shards"),
        ("shared memory", "call share_memory before parallelize"),
        ("other data", "model.embed_tokens.weight.data was set after parallelize"),
        ("from a vector", "model.embed_tokens.weight.data was set after parallelize"),
        ("replaced", "model.layers.1.input_layernorm.weight was replaced after parallelize, and would not be used"),
        ("part in half", "was replaced after parallelize, and would not be used"),
        ("checkpointing", "parallelize(checkpoint='attention')"),
        ("no checkpointing", "parallelize(checkpoint='attention')"),
        ("new head", "changed after parallelize (lm_head)"),
        ("new parameter", "changed after parallelize (model.layers.1.mlp)"),
    ],
)
def test_what_changes_weights_afterwards_is_refused(pool, how, message):
    for outcome in pool.outcomes(changed_afterwards, 2, how):
        assert isinstance(outcome, rs.UnsupportedError) and message in str(outcome)


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
    model.load_state_dict({name: x * 0.9 for name, x in model.state_dict().items()}, assign=True)
    model.init_weights()
    model.tie_weights()
    model.apply(lambda module: None)
    model.requires_grad_(False).requires_grad_(True)
    model.eval().train()
    return step(model, mesh)


def test_weights_that_are_written_where_they_are_count(pool):
    loss, _, gradients = written(None)
    plain = one_step("llama", "as it is")
    assert relative(loss, plain[0]) > 1e-4
    check(pool.run(written, 2), (loss, gradients))


def left_as_it_is(mesh: DeviceMesh) -> Any:
    model = rs.parallelize(build("llama"), mesh)
    return step(model.float().to("cpu").to(torch.float32).train().requires_grad_(True), mesh)


def test_what_changes_nothing_is_done(pool):
    check(pool.run(left_as_it_is, 2), one_step("llama", "as it is"))


def resized(mesh: DeviceMesh) -> Any:
    return step(rs.parallelize(longer(), mesh), mesh)


def longer() -> Any:
    model = build("llama")
    model.resize_token_embeddings(120, mean_resizing=False)
    return model


def test_embeddings_resized_before_are_as_on_one_process(pool):
    loss, _, gradients = step(longer())
    assert gradients["lm_head.weight"].shape == (120, 64)
    check(pool.run(resized, 2), (loss, gradients))


def other_mesh(mesh: DeviceMesh) -> None:
    rs.parallelize(build("llama"), DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("data", "context")))


def test_a_mesh_with_other_axes_is_refused(pool):
    for outcome in pool.outcomes(other_mesh, 4):
        assert isinstance(outcome, rs.ConfigError) and "no role is known for context (2)" in str(outcome)


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
    [("ddp", "model.module"), ("sharded", "fully_shard of model.layers.1"), ("around", "sharded before")],
)
def test_a_model_that_somebody_distributed_before_is_refused(pool, how, message):
    for outcome in pool.outcomes(given, 4, how):
        assert isinstance(outcome, rs.UnsupportedError) and message in str(outcome)


def wrapped_afterwards(mesh: DeviceMesh) -> None:
    DistributedDataParallel(rs.parallelize(build("llama"), mesh))


def test_a_model_on_the_ring_is_not_wrapped_for_data_parallelism(pool):
    for outcome in pool.outcomes(wrapped_afterwards, 4):
        assert isinstance(outcome, rs.UnsupportedError) and "ringspan.hf.ring_accelerator" in str(outcome)


def with_embedding(**options: Any) -> Any:
    model = build("llama")
    model.set_input_embeddings(nn.Embedding(97, 64, **options))
    return model


def quantised() -> Any:
    return quantize_dynamic(build("llama"), {nn.Linear}, dtype=torch.qint8)


def packed() -> Any:
    model = build("llama")
    model.is_quantized, model.quantization_method = True, "bitsandbytes"
    return model


def of_integers() -> Any:
    model = build("llama")
    weight = torch.zeros(64, 64, dtype=torch.int8)
    model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(weight, requires_grad=False)
    return model


def with_own_forward() -> Any:
    model = build("llama")
    model.forward = model.forward
    return model


def over_the_same_memory() -> Any:
    model = build("llama")
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_embedding(max_norm=1.0), r"model.embed_tokens has max_norm=1\.0"),
        (lambda: with_embedding(sparse=True), "sparse=True"),
        (lambda: with_embedding(scale_grad_by_freq=True), "scale_grad_by_freq=True"),
        (quantised, "quantised"),
        (packed, r"LlamaForCausalLM is quantised \(bitsandbytes\), .*model.dequantize\(\), then save_pretrained"),
        (of_integers, r"q_proj.weight is torch\.int8"),
        (with_own_forward, "del model.forward"),
        (over_the_same_memory, "two parameters over the same memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_that_no_ring_can_split_are_refused(make, message):
    model = make()
    with pytest.raises(rs.UnsupportedError, match=message):
        refuse_unsupported(model)


def padded(mesh: DeviceMesh | None = None) -> Any:
    torch.manual_seed(5)
    model = with_embedding(padding_idx=-92)  # token 5
    return step(rs.parallelize(model, mesh) if mesh else model, mesh)


def test_a_row_that_pads_gets_no_gradient(pool):
    loss, _, gradients = padded()
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
    module.register_forward_pre_hook(lambda _, given: (given[0] * 1.5, *given[1:]) if is_float(given) else None)
    module.register_forward_hook(lambda _, __, out: out * 0.5 if isinstance(out, Tensor) else None)
    module.register_full_backward_hook(lambda _, d_in, __: tuple(None if d is None else 2.0 * d for d in d_in))


def is_float(given: tuple[Any, ...]) -> bool:
    return bool(given) and isinstance(given[0], Tensor) and given[0].is_floating_point()


PLACES = [
    *("lm_head", "model.embed_tokens", "model.norm", "model.layers.0", "model.layers.1.mlp"),
    *("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.input_layernorm"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", PLACES)
def test_hooks_do_what_they_do_on_one_process(pool, where, after):
    loss, _, gradients = hooked(None, where, after)
    plain = one_step("llama", "as it is")
    names = gradients.keys()
    assert relative(loss, plain[0]) > 1e-6 or any(relative(gradients[n], plain[1][n]) > 1e-3 for n in names)
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
    with pytest.raises(rs.UnsupportedError, match=r"layers\.1\.self_attn\.o_proj has hooks, a parametrization"):
        refuse_split(model, 2)


def late_hook(mesh: DeviceMesh) -> None:
    model = rs.parallelize(build("llama"), mesh)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _, __, out: out)
    step(model, mesh)


def test_a_hook_on_a_split_projection_is_refused(pool):
    for outcome in pool.outcomes(late_hook, 2, tp=2):
        assert isinstance(outcome, rs.UnsupportedError) and "Linear that tp splits has hooks" in str(outcome)


def parameter_names(mesh: DeviceMesh) -> list[str]:
    return list(inspect.signature(rs.parallelize(build("llama"), mesh).forward).parameters)


def test_whoever_reads_the_signature_finds_labels(pool):
    """Transformers' Trainer drops the columns of a data set that have no name here."""
    [names] = pool.run(parameter_names, 1)
    assert {"input_ids", "labels", "attention_mask", "position_ids", "shift_labels"} <= set(names)


def checkpointed_before(mesh: DeviceMesh, checkpoint: Any) -> Any:
    model = build("llama")
    model.gradient_checkpointing_enable()
    return step(rs.parallelize(model, mesh, checkpoint=checkpoint), mesh)


def test_checkpointing_that_was_on_before_gives_way_or_is_refused(pool):
    check(pool.run(checkpointed_before, 2, "attention"), one_step("llama", "as it is"))
    for outcome in pool.outcomes(checkpointed_before, 2, "none"):
        assert isinstance(outcome, rs.ConfigError) and "gradient_checkpointing_disable()" in str(outcome)


def compiled_in_place(mesh: DeviceMesh, after: bool) -> Any:
    model = build("llama")
    if not after:
        model.compile(backend="eager")
    rs.parallelize(model, mesh)
    if after:
        model.compile(backend="eager")
    result = step(model, mesh)
    torch.compiler.reset()
    return result


@pytest.mark.parametrize("after", [*long(False), True], ids=["before", "after"])
def test_a_model_compiled_in_place_computes_the_same(pool, after):
    check(pool.run(compiled_in_place, 2, after), one_step("llama", "as it is"))


class BatchNormed(nn.Module):
    """A feed-forward behind a batch norm, which remembers the mean of the tokens that it saw."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(64)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(self.norm(hidden.mT).mT)


def with_buffers(mesh: DeviceMesh | None, how: str, checkpoint: str, frozen: bool) -> Any:
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
@pytest.mark.parametrize(("how", "name"), [("batch norm", "mlp.norm.num_batches"), ("spectral norm", "weight.0._u")])
def test_layers_that_change_their_buffers_raise(pool, how, name, checkpoint):
    for outcome in pool.outcomes(with_buffers, 2, how, checkpoint, False):
        assert isinstance(outcome, rs.UnsupportedError), outcome
        assert name in str(outcome) and "changed in a forward pass" in str(outcome)


@pytest.mark.parametrize("how", ["batch norm", "spectral norm"])
def test_buffers_that_stay_are_those_of_one_process(pool, how):
    loss, _, gradients = with_buffers(None, how, "none", True)
    check(pool.run(with_buffers, 2, how, "attention", True), (loss, gradients))
