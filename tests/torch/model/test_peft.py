"""Models that PEFT wraps, on the ring: gradients, folders and switches against one process."""

from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from packaging.version import Version
from peft import (
    AdaLoraConfig,
    AutoPeftModelForCausalLM,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers.integrations.peft import MIN_PEFT_VERSION

import ringspan as rs
from ringspan.torch.generate.cache.identity import weights_digest
from ringspan.torch.model.support import refuse_unsupported
from ringspan.torch.model.tensor_parallel.split import refuse_split
from ringspan.torch.model.view import view_of
from tests.cases import long
from tests.torch.models import build, check, relative, step, tokens, whole

LIMITS = 2e-6, 1e-5  # of the loss, of gradients
PROJECTIONS = ["q_proj", "v_proj", "down_proj"]

# name: kind of model, adapter
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "all-linear": ("llama-tied", {"target_modules": "all-linear"}),
    "head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "tied head": ("llama-tied", {"target_modules": ["lm_head"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "both ends": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "saved ends": (
        "llama",
        {"target_modules": PROJECTIONS, "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "saved tied ends": (
        "llama-tied",
        {
            "target_modules": PROJECTIONS,
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "tokens": (
        "llama",
        {"target_modules": PROJECTIONS, "trainable_token_indices": [1, 5, 96]},
    ),
    "tied tokens": (
        "llama-tied",
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5, 96]},
    ),
    "dora": ("llama", {"target_modules": [*PROJECTIONS, "lm_head"], "use_dora": True}),
    "bias": ("llama-tied", {"target_modules": PROJECTIONS, "bias": "all"}),
    "gemma": ("gemma2", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "latents": ("deepseek_v3", {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa"]}),
    "routed": ("mixtral", {"target_modules": ["lm_head", "q_proj"]}),
}
CHANGES = {"mixtral": {"num_local_experts": 4, "output_router_logits": True}}


def adapt(kind: str, options: dict[str, Any], **changes: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options)
    return stir(get_peft_model(build(kind, **CHANGES.get(kind, {}) | changes), config))


def stir(model: Any) -> Any:
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += (0.05 * noise).to(parameter.dtype)
    return model


def ring_step(
    mesh: DeviceMesh, kind: str, adapter: dict[str, Any], options: dict[str, Any]
) -> Any:
    model = adapt(kind, adapter)
    assert rs.parallelize(model, mesh, **options) is model
    return step(model, mesh)


EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def two_steps(mesh: DeviceMesh | None) -> Any:
    """Of LoRA on parameters, which PEFT takes out of their module for a pass, and puts back behind the others."""
    model = adapt("gpt_oss", EXPERTS)
    if mesh is not None:
        before = weights_digest(rs.parallelize(model, mesh).get_base_model())
    first = step(model, mesh)
    assert mesh is None or weights_digest(model.get_base_model()) == before
    model.zero_grad()
    return first, step(model, mesh)


def test_adapted_parameters_train_as_on_one_process(pool):
    expected = two_steps(None)
    for found in pool.run(two_steps, 2):
        check([found[0]], expected[0], LIMITS)
        check([found[1]], expected[1], LIMITS)


# Each of the others has an adapter on a part that one of the rest has, too.
MORE = (
    *("attention", "head", "embedding", "both ends", "tied tokens", "routed"),
    *("all-linear", "tied head", "latents"),
)


@pytest.mark.parametrize(
    "name", [*(name for name in ADAPTERS if name not in MORE), *long(*MORE)]
)
def test_an_adapted_model_trains_as_on_one_process(pool, name):
    kind, adapter = ADAPTERS[name]
    expected = step(adapt(kind, adapter))
    assert any(g is not None for g in expected[1].values()) and any(
        g is None for g in expected[1].values()
    )
    check(
        pool.run(ring_step, 2, kind, adapter, {"loss_chunk_tokens": 7}),
        expected,
        LIMITS,
    )


def saved(mesh: DeviceMesh, base: Path, folder: Path, adapter: dict[str, Any]) -> Any:
    model = stir(
        get_peft_model(
            from_folder(base), LoraConfig(task_type="CAUSAL_LM", r=4, **adapter)
        )
    )
    rs.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    step(model, mesh)
    optimizer.step()
    gathered: list[int] = []

    def full(self: Any) -> torch.Tensor:
        gathered.append(self.numel())
        return plain(self)

    plain = DTensor.full_tensor
    with mock.patch.object(DTensor, "full_tensor", full):
        model.save_pretrained(folder)
    return {name: whole(p.detach()) for name, p in model.named_parameters()}, sum(
        gathered
    )


def from_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(4)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


@pytest.mark.parametrize(
    "name", [*long("head"), "saved ends", "dora", *long("attention", "tied tokens")]
)
def test_peft_opens_the_folder_with_equal_weights(pool, tmp_path, name):
    kind, adapter = ADAPTERS[name]
    build(kind).save_pretrained(tmp_path / "base")
    (weights, gathered), _ = pool.run(
        saved, 2, tmp_path / "base", tmp_path / "adapter", adapter
    )
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert gathered == sum(map(torch.numel, written.values())), (
        "what is not written is gathered nowhere"
    )
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded: Any = PeftModel.from_pretrained(
        from_folder(tmp_path / "base"), tmp_path / "adapter"
    )
    auto: Any = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    for model in (loaded, auto):
        opened = dict(model.named_parameters())
        assert opened.keys() == weights.keys()
        for path, weight in weights.items():
            assert torch.equal(opened[path], weight), path
    ids = tokens(1, 9)
    assert relative(loaded.merge_and_unload()(ids).logits, auto(ids).logits) < 1e-5


def switches(mesh: DeviceMesh, first: bool, options: dict[str, Any]) -> Any:
    """Losses without the adapter, with it and with another one; in either order before the first step."""
    model = two_adapters()
    rs.parallelize(model, mesh, **options)
    results = [step(model, mesh)] if first else []
    model.zero_grad()
    results += switched(model, mesh)
    return results


def two_adapters() -> Any:
    model = adapt("llama", {"target_modules": ["q_proj", "lm_head"]})
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj", "lm_head"]))
    model.set_adapter("second")
    stir(model)
    model.set_adapter("default")
    return model


def switched(model: Any, mesh: DeviceMesh | None = None) -> list[Any]:
    results: list[Any] = []
    ids = tokens(1, 37)
    batch = {"input_ids": ids, "labels": ids}
    with model.disable_adapter(), torch.no_grad():
        results.append(
            (model(**(rs.shard_batch(batch, mesh) if mesh else batch)).loss, {})
        )
    for name in (None, None, "second", "default", None):
        if name:
            model.set_adapter(name)
        results.append(step(model, mesh))
        model.zero_grad()
    return results


@pytest.mark.parametrize(
    ("first", "options", "bound"),
    [(True, {}, 1e-5), *long((False, {"compute_dtype": torch.bfloat16}, 5e-2))],
)
def test_adapters_are_switched_on_and_off(pool, first, options, bound):
    """A first pass without any of them must not decide for all that follow."""
    expected = switched(two_adapters())
    for found in pool.run(switches, 2, first, options):
        for one, other in zip(found[first:], expected, strict=True):
            check([one], other, (bound / 5, bound))


def ia3(mesh: DeviceMesh | None = None) -> Any:
    torch.manual_seed(1)
    config = IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    )
    model = stir(get_peft_model(build("llama"), config))
    if mesh:
        rs.parallelize(model, mesh)
    return step(model, mesh)


def test_ia3_trains_as_on_one_process(pool):
    check(pool.run(ia3, 2), ia3(), LIMITS)


def half_step(mesh: DeviceMesh, autocast: bool) -> Any:
    model = rs.parallelize(halves(autocast), mesh)
    return step(model, mesh), {str(p.dtype) for p in model.parameters()}


def halves(autocast: bool) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"]
    )
    return stir(
        get_peft_model(
            build("llama").bfloat16(), config, autocast_adapter_dtype=autocast
        )
    )


@pytest.mark.parametrize(
    "autocast", [True, False], ids=["float32 adapters", "bfloat16 adapters"]
)
def test_a_bfloat16_model_with_adapters_trains(pool, autocast):
    expected = step(halves(autocast))
    for result, types in pool.run(half_step, 2, autocast):
        assert ("torch.float32" in types) == autocast
        check([result], expected, (1e-2, 5e-2))


def refused(mesh: DeviceMesh, how: str) -> None:
    configs: dict[str, Any] = {
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "adalora": AdaLoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=10
        ),
        "alora": LoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj"],
            alora_invocation_tokens=[3],
        ),
    }
    plain = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    if how == "tied":
        rs.parallelize(
            adapt(
                "llama-tied",
                {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            ),
            mesh,
        )
    if how == "types":
        config = LoraConfig(
            task_type="CAUSAL_LM", target_modules=["lm_head"], modules_to_save=["norm"]
        )
        rs.parallelize(get_peft_model(build("llama").bfloat16(), config), mesh)
    model = rs.parallelize(
        get_peft_model(build("llama"), configs.get(how, plain)), mesh
    )
    match how:
        case "add_adapter":
            model.add_adapter("other", plain)
        case "inner add_adapter":
            model.get_base_model().add_adapter(plain, "other")
        case "half":
            model.half()
        case "twice":
            rs.parallelize(model, mesh)
        case "inner twice":
            rs.parallelize(model.get_base_model(), mesh)
        case "convert":
            model.save_pretrained("nowhere", True, None, "auto", True, "elsewhere")
        case "labels":
            model(
                **rs.shard_batch({"input_ids": tokens(1, 8)}, mesh), labels=tokens(1, 8)
            )
        case name:
            getattr(model, name)()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("prompt", "PROMPT_TUNING"),
        ("adalora", "AdaLoraModel does more than call the model"),
        ("alora", "alora_invocation_tokens"),
        ("tied", "two parameters over the same memory"),
        ("types", "autocast_adapter_dtype=False"),
        *long(
            ("add_adapter", "before parallelize"),
            ("inner add_adapter", "before parallelize"),
            ("merge_and_unload", "save_pretrained"),
            ("merge_adapter", "save_pretrained"),
            ("unload", "disable_adapter"),
            ("half", "before parallelize"),
        ),
        ("twice", "on a ring already"),
        *long(("inner twice", "on a ring already")),
        ("convert", "path_initial_model_for_weight_conversion"),
        (
            "labels",
            "labels is not supported on a ring; make the batch with rs.shard_batch",
        ),
    ],
)
def test_unsupported_uses_of_an_adapted_model_raise(pool, how, message):
    for outcome in pool.outcomes(refused, 2, how):
        assert isinstance(outcome, rs.UnsupportedError) and message in str(outcome)


def counted(mesh: DeviceMesh) -> Any:
    model = rs.parallelize(adapt("llama", {"target_modules": PROJECTIONS}), mesh)
    return model.get_nb_trainable_parameters()


def test_trainable_parameters_are_those_of_the_whole_model(pool):
    expected = adapt(
        "llama", {"target_modules": PROJECTIONS}
    ).get_nb_trainable_parameters()
    assert pool.run(counted, 2) == [expected] * 2


def transformers_adapter(mesh: DeviceMesh, folder: Path) -> Any:
    model = build("llama")
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    stir(model)
    rs.parallelize(model, mesh)
    result = step(model, mesh)
    model.save_pretrained(folder)
    return result, {name: whole(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"add_adapter of this transformers needs PEFT {MIN_PEFT_VERSION}",  # 5.24 one that is not published yet
)
def test_an_adapter_of_transformers_trains_and_is_written(pool, tmp_path):
    model = build("llama")
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    expected = step(stir(model))
    for result, weights in pool.run(transformers_adapter, 2, tmp_path):
        check([result], expected, LIMITS)
        opened: Any = PeftModel.from_pretrained(build("llama"), tmp_path)
        for name, parameter in opened.named_parameters():
            assert torch.equal(
                parameter, weights[name.removeprefix("base_model.model.")]
            ), name


EVEN = {"vocab_size": 98}


def split_step(mesh: DeviceMesh, adapter: dict[str, Any], folder: Path) -> Any:
    model = adapt("llama-tied", adapter, **EVEN)
    rs.parallelize(model, mesh, checkpoint="none")
    result = step(model, mesh)
    model.save_pretrained(folder)
    return result


@pytest.mark.parametrize(
    "targets", [*long(["q_proj"], ["o_proj", "k_proj"]), "all-linear"], ids=str
)
def test_adapters_of_split_projections_train_as_on_one_process(pool, tmp_path, targets):
    """With biases, on the base layer and on the adapter's second matrix."""
    adapter = {"target_modules": targets, "lora_bias": targets == "all-linear"}
    expected = step(adapt("llama-tied", adapter, **EVEN))
    check(pool.run(split_step, 2, adapter, tmp_path, tp=2), expected, LIMITS)
    opened: Any = PeftModel.from_pretrained(build("llama-tied", **EVEN), tmp_path)
    for name, weight in adapt("llama-tied", adapter, **EVEN).named_parameters():
        if "lora" in name:
            assert torch.equal(dict(opened.named_parameters())[name], weight), name


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "DoraLinearVariant"),
        ({"target_modules": ["lm_head"]}, "lm_head is a peft.tuners.lora.layer.Linear"),
        (
            {"target_modules": ["embed_tokens"]},
            "embed_tokens is a peft.tuners.lora.layer.Embedding",
        ),
        (
            {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
            "TrainableTokensWrapper",
        ),
        ({"target_modules": ["q_proj"], "lora_dropout": 0.1}, "dropout 0.1"),
    ],
)
def test_adapters_that_cannot_be_split_are_refused(adapter, message):
    model = adapt("llama", adapter, **EVEN)
    with pytest.raises(rs.UnsupportedError, match=message):
        refuse_split(model.get_base_model(), 2)


def test_merged_adapters_are_refused():
    model = adapt("llama", ADAPTERS["attention"][1])
    model.merge_adapter()
    with pytest.raises(rs.UnsupportedError, match="merge_and_unload"):
        refuse_unsupported(view_of(model.get_base_model()))
    refuse_unsupported(view_of(model.merge_and_unload()))


def unwritable(mesh: DeviceMesh, path: Path) -> None:
    rs.parallelize(adapt("llama", ADAPTERS["attention"][1]), mesh).save_pretrained(path)


def test_every_rank_learns_that_an_adapter_could_not_be_written(pool, tmp_path):
    path = tmp_path / "a file"
    path.write_text("")
    first, *others = pool.outcomes(unwritable, 4, path, replicate=2)
    assert isinstance(first, ValueError) and "should be a directory" in str(first)
    for outcome in others:
        assert isinstance(outcome, rs.PeerMismatch) and "should be a directory" in str(
            outcome
        )


def with_kept_head(base: torch.dtype, head: torch.dtype, exact: bool) -> Any:
    """A model whose head is trained in another dtype than it computes in; ``exact``: in float64 of the same numbers."""
    torch.manual_seed(1)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
    )
    model: Any = stir(
        get_peft_model(build("llama").to(base), config, autocast_adapter_dtype=False)
    )
    copy = model.get_output_embeddings().modules_to_save["default"].to(head)
    assert copy.weight.dtype != base
    return model.double() if exact else model


def kept_step(
    mesh: DeviceMesh, base: torch.dtype, head: torch.dtype, casts: bool
) -> Any:
    model = rs.parallelize(
        with_kept_head(base, head, exact=False), mesh, loss_chunk_tokens=7
    )
    ids = tokens(1, 37)
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        loss = model(**batch).loss
        loss.backward()
        scores = rs.token_logprobs(model, batch).sum().detach()
        logits = model(
            **{name: x for name, x in batch.items() if name != "shift_labels"}
        ).logits
    gradient = next(
        p.grad
        for name, p in model.named_parameters()
        if "lm_head.modules_to_save" in name
    )
    return loss.detach(), whole(gradient).double(), scores, logits.isfinite().all()


@pytest.mark.parametrize(
    ("base", "head", "casts", "bound"),
    [
        (torch.float32, torch.bfloat16, False, 2e-6),
        *long(
            (torch.bfloat16, torch.float32, False, 1e-2),
            (torch.float32, torch.bfloat16, True, 1e-2),
        ),
    ],
)
def test_a_head_is_trained_in_another_dtype_than_the_layers(
    pool, base, head, casts, bound
):
    model, ids = with_kept_head(base, head, exact=True), tokens(1, 37)
    loss = cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
    loss.backward()
    expected = model.get_output_embeddings().modules_to_save["default"].weight.grad
    for found, gradient, scores, is_finite in pool.run(kept_step, 2, base, head, casts):
        assert (
            relative(found, loss.detach()) < bound
            and relative(scores, -36 * loss.detach()) < bound
        )
        # as wide as the narrower of the two
        assert relative(gradient, expected) < max(4e-3, 4 * bound)
        assert is_finite
