"""The feed-forward in blocks: the same loss and gradients, what it keeps, and what is refused by name."""

import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import ringspan as rs
from ringspan.core.arguments import FREE_CHUNK_TOKENS
from ringspan.torch.model.layers.blockwise.blocks import (
    Blockwise,
    mixes_tokens,
    run_in_blocks,
)
from ringspan.torch.model.layers.blockwise.feedforward import (
    find_feedforwards,
    free_feedforwards,
)
from ringspan.torch.model.memory.checkpointing import checkpoint_layers
from ringspan.torch.model.view import view_of
from tests.torch.models import build, check, kept_bytes, logged, relative, step, tokens

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama-tied", {}),  # with biases
    ("gemma3_text", {}),  # a norm after the feed-forward
    (
        "gpt2",
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    ("mixtral", {"num_local_experts": 4}),
    # its experts also return scores
    (
        "gpt_oss",
        {"num_local_experts": 4, "head_dim": 16},
    ),
]


def chunked_step(
    kind: str, changes: dict[str, Any], chunk: int, checkpoint: Any, count: Any = None
) -> Any:
    model = build(kind, **changes).train()
    feedforwards = find_feedforwards(view_of(model))
    if chunk:
        run_in_blocks(
            find_feedforwards(view_of(model)), chunk, "feedforward_chunk_tokens"
        )
    checkpoint_layers(view_of(model), checkpoint)
    if count is not None:
        for module in feedforwards:
            module.act_fn.register_forward_hook(count)
    return step(model)


@pytest.mark.parametrize(("kind", "changes"), MODELS, ids=[kind for kind, _ in MODELS])
def test_any_model_has_the_same_loss_and_gradients_in_chunks(kind, changes):
    found = [
        chunked_step(kind, changes, chunk, checkpoint)
        for chunk, checkpoint in ((5, "none"), (100, "full"))
    ]
    check(found, chunked_step(kind, changes, 0, "none"), (1e-6, 1e-6))


def test_blocks_are_recomputed_in_the_autocast_of_forward():
    """Backward runs outside of the context, as PyTorch's own training loops have it."""
    model = build("llama").train()
    feedforwards: list[Any] = find_feedforwards(view_of(model))
    run_in_blocks(find_feedforwards(view_of(model)), 5, "feedforward_chunk_tokens")
    seen: list[tuple[bool, torch.dtype]] = []
    for module in feedforwards:
        module.act_fn.register_forward_hook(
            lambda _, __, out: seen.append((torch.is_grad_enabled(), out.dtype))
        )
    ids = tokens(2, 19)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert {again for again, _ in seen} == {False, True}
    assert {dtype for _, dtype in seen} == {torch.bfloat16}


@pytest.mark.parametrize(("kind", "layer_runs"), [("llama", 2), ("gemma3_text", 3)])
def test_a_checkpointed_layer_runs_its_feedforward_minimally(kind, layer_runs):
    """Once forward and once in backward; a norm behind it needs its result again."""
    runs: list[Any] = []
    chunked_step(kind, {}, 10, "full", lambda *_: runs.append(1))
    blocks, layers = 4, 2
    assert len(runs) == layer_runs * blocks * layers


class Layer(GradientCheckpointingLayer):
    """A decoder layer of nothing but a feed-forward as the paper has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(hidden)


class Model(PreTrainedModel):
    """A model of one layer."""

    def __init__(self, size: int, layer: nn.Module | None = None) -> None:
        super().__init__(PretrainedConfig(hidden_size=size))
        self.layer = layer or Layer(size)


def test_it_keeps_2bsh_bytes_instead_of_the_papers_8bsh_and_more():
    """Blockwise Parallel Transformer, section 3: in 16 bits the intermediates of a feed-forward of 4h take 8bsh, its
    input takes 2bsh.
    """
    b, s, h = 2, 24, 16
    hidden = torch.randn(b, s, h).bfloat16().requires_grad_()
    model: Any = Model(h).bfloat16()
    # Its input, and the activation's before and after.
    assert kept_bytes(model.layer, hidden) >= (2 + 8 + 8) * b * s * h
    run_in_blocks(find_feedforwards(view_of(model)), 5, "feedforward_chunk_tokens")
    assert kept_bytes(model.layer, hidden) == 2 * b * s * h


class Shift(nn.Module):
    """The smallest module with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(1, 1))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.by


def test_gradients_of_the_weights_add_up_in_float32():
    """258 blocks with a gradient of 1 each: in bfloat16 their sum would stop growing at 256."""
    model: Any = Model(1, Layer(1))
    model.layer.mlp = Shift()
    run_in_blocks(
        find_feedforwards(view_of(model.bfloat16())), 1, "feedforward_chunk_tokens"
    )
    model.layer(torch.zeros(1, 258, 1).bfloat16()).sum().backward()
    assert model.layer.mlp.by.grad.item() == 258.0


class Mixing(nn.Module):
    """Token-wise but for one thing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.linear(hidden)
        match self.how:
            case "mean":
                return out + 1e-3 * hidden.mean(1, keepdim=True)
            case "place":
                return out * torch.linspace(1, 1.01, hidden.shape[1])[:, None]
            case "batch":
                return out + 1e-3 * hidden.mean(0, keepdim=True)
        return out


@pytest.mark.parametrize("how", ["mean", "place", "batch"])
def test_a_module_that_mixes_tokens_is_refused_by_name(how):
    model: Any = Model(8, Layer(8))
    model.layer.mlp = Mixing(how)
    with pytest.raises(rs.UnsupportedError, match="mlp mixes tokens"):
        run_in_blocks(find_feedforwards(view_of(model)), 4, "feedforward_chunk_tokens")
    assert mixes_tokens(Mixing("none"), 8) == ""
    assert mixes_tokens(Mixing("none").to("meta"), 8) == "", (
        "tried on weights made up for it"
    )


def test_a_random_feedforward_is_refused_in_any_mode():
    """As ``from_pretrained`` leaves it, a model is in evaluation, where a mixture's jitter does not show."""
    model = build("mixtral", num_local_experts=4, router_jitter_noise=0.1).eval()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(
        rs.UnsupportedError, match=r"layers\.0.*mlp is random in training"
    ):
        run_in_blocks(find_feedforwards(view_of(model)), 4, "feedforward_chunk_tokens")
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in model.modules())


def test_what_has_no_feedforward_in_one_piece_is_refused_by_name():
    with pytest.raises(
        rs.UnsupportedError,
        match=r"OPTForCausalLM.*layers\.0.*fc1 is a part of a feed-forward",
    ):
        find_feedforwards(view_of(build("opt", ffn_dim=96)))
    with pytest.raises(rs.UnsupportedError, match=r"mlp has dropout 0\.1"):
        find_feedforwards(
            view_of(build("gpt2", n_embd=64, n_head=4, n_layer=1, resid_pdrop=0.1))
        )
    with pytest.raises(rs.ConfigError, match="feedforward_chunk_tokens"):
        run_in_blocks(
            find_feedforwards(view_of(build("llama"))), 0, "feedforward_chunk_tokens"
        )


@pytest.mark.parametrize(("kind", "is_cut"), [("llama", True), ("gemma3_text", False)])
def test_the_default_cuts_what_then_runs_no_more_often(kind, is_cut, caplog):
    model = build(kind).train()
    assert free_feedforwards(view_of(model), checkpointed=True) == (
        find_feedforwards(view_of(model)) if is_cut else []
    )
    assert [
        message for message in caplog.messages if "Gemma3ForCausalLM" in message
    ] == caplog.messages
    assert len(caplog.messages) == (not is_cut)
    assert free_feedforwards(view_of(model), checkpointed=False) == [], (
        "without a checkpoint blocks cost one more pass"
    )


def test_trying_a_layer_leaves_nothing_behind():
    model, results = build("llama").train(), []
    model.model.layers[0].mlp.register_forward_hook(
        lambda *given: results.append(weakref.ref(given[2]))
    )
    model.model.layers[1].register_forward_pre_hook(
        lambda *_: results.append("the second layer runs")
    )
    assert free_feedforwards(view_of(model), checkpointed=True) == [
        layer.mlp for layer in model.model.layers
    ]
    assert results[-1]() is None and "the second layer runs" not in results


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("more", "mlp is called with more than hidden states"),
        ("broken", r"could not be tried out \(ValueError\)"),
    ],
)
def test_the_default_leaves_what_it_cannot_try(how, reason, monkeypatch, caplog):
    model = build("llama").train()
    forward = type(model.model.layers[0]).forward

    def changed(self: Any, hidden: Tensor, **kwargs: Any) -> Tensor:
        if how == "broken":
            raise ValueError
        return forward(self, hidden, **kwargs) + 0 * self.mlp(x=hidden)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", changed)
    assert free_feedforwards(view_of(model), checkpointed=True) == []
    assert re.search(reason, caplog.text)
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )


def on_a_ring(mesh: DeviceMesh) -> Any:
    """Tokens at a time of feed-forwards and norms of some models, and what was logged; a number for the last raises."""
    chunks = []
    cases: list[tuple[str, dict[str, Any]]] = [
        ("llama", {}),
        ("llama", {"checkpoint": "none"}),
        ("llama", {"feedforward_chunk_tokens": 0, "norm_chunk_tokens": 0}),
        (
            "llama",
            {
                "feedforward_chunk_tokens": 7,
                "norm_chunk_tokens": 5,
                "checkpoint": "none",
            },
        ),
        ("gemma3_text", {"feedforward_chunk_tokens": 7}),
        ("llama4_text", {}),
    ]
    with logged() as lines:
        for kind, options in cases:
            model = rs.parallelize(build(kind), mesh, **options)
            blocks: list[Any] = [
                module for module in model.modules() if isinstance(module, Blockwise)
            ]
            of = {module.chunk_option: module.chunk_tokens for module in blocks}
            chunks.append(
                (of.get("feedforward_chunk_tokens"), of.get("norm_chunk_tokens"))
            )
    with pytest.raises(
        rs.UnsupportedError, match="Llama4ForCausalLM has no feed-forward"
    ):
        rs.parallelize(build("llama4_text"), mesh, feedforward_chunk_tokens=7)
    return chunks, lines


def test_feedforwards_are_cut_by_default_and_exceptions_logged(pool):
    free = FREE_CHUNK_TOKENS
    for rank, (chunks, lines) in enumerate(pool.run(on_a_ring, 2)):
        assert chunks == [
            (free, free),
            (None, None),
            (None, None),
            (7, 5),
            (7, free),
            (None, free),
        ]
        assert len(lines) == (rank == 0), "by the first rank alone"
        assert all("all tokens at once: Llama4ForCausalLM" in line for line in lines)


class Summed(nn.Module):
    """A matrix that is the sum of two, whose gradients are one tensor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(size, size)) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.a + self.b)


def test_gradients_that_share_memory_add_up_apart():
    module, plain = Summed(8), Summed(8)
    plain.load_state_dict(module.state_dict())
    run_in_blocks([module], 5, "chunk_tokens")
    hidden = torch.randn(1, 17, 8)
    for each in (module, plain):
        each(hidden).square().sum().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert (
            one.grad is not None
            and other.grad is not None
            and relative(one.grad, other.grad) < 1e-6
        )


def mixing(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out - out.mean(1, keepdim=True)


@pytest.mark.parametrize("how", ["hook", "own forward"])
def test_of_modules_alike_each_with_other_code_is_tried(how):
    """The first layer's feed-forward passes; the second has the same class and shapes, and mixes tokens."""
    model = build("llama")
    mlp = model.model.layers[1].mlp
    if how == "hook":
        mlp.down_proj.register_forward_hook(mixing)
    else:
        plain = mlp.forward
        mlp.forward = lambda hidden: mixing(mlp, None, plain(hidden))
    with pytest.raises(
        rs.UnsupportedError, match=r"model\.layers\.1|layers\.1.*mlp mixes tokens"
    ):
        find_feedforwards(view_of(model))


def test_a_forward_that_was_set_on_a_module_runs_in_blocks():
    module, seen = nn.Sequential(nn.Linear(4, 4)), []
    plain: Any = module.forward

    def own(hidden: Tensor) -> Tensor:
        seen.append(hidden.shape[1])
        return 2.0 * plain(hidden)

    module.forward = own
    hidden = torch.randn(1, 12, 4)
    expected = module(hidden)
    run_in_blocks([module], 5, "chunk_tokens")
    assert relative(module(hidden), expected) < 1e-6 and seen == [12, 5, 5, 2]
