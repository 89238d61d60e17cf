"""The Llama of the examples on JAX's ring against Hugging Face's on one process: loss, gradients and a step."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs ringspan[jax]")

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from jax.sharding import Mesh
from transformers import AutoModelForCausalLM

import ringspan as rs
from examples.jax_llama import (
    Llama,
    LlamaConfig,
    load_checkpoint,
    load_llama,
    look_up,
    mean_loss,
    save_checkpoint,
    save_llama,
)
from ringspan.jax import init_mesh, map_mesh, shard_batch
from tests.cases import long
from tests.torch.models import build

VOCAB, RATE = 96, 1e-3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Hugging Face folders of a Llama and of one with tied embeddings."""
    made = {}
    for kind, changes in (("llama", {}), ("llama-tied", {"mlp_bias": False})):
        made[kind] = tmp_path_factory.mktemp(kind) / "model"
        build(kind, vocab_size=VOCAB, **changes).save_pretrained(made[kind])
    return made


def batch_of(num: int, length: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(3).integers(0, VOCAB, (num, length))
    labels = ids.copy()
    labels[0, 7:] = -100  # some ranks have hardly a target
    return {"input_ids": ids, "labels": labels}


def torch_step(folder, batch):
    """Loss, gradients, and weights after one step of AdamW, on one process."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa"
    ).float()
    loss = model(**{name: torch.from_numpy(x) for name, x in batch.items()}).loss
    loss.backward()
    gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, eps=1e-6).step()
    return (
        float(loss.detach()),
        gradients,
        {name: p.detach().numpy() for name, p in model.named_parameters()},
    )


def by_name(model: Llama) -> dict[str, np.ndarray]:
    """Weights, or gradients in their place, under Hugging Face's names."""
    arrays = {
        "model.embed_tokens.weight": model.embed_tokens,
        "model.norm.weight": model.norm,
    }
    if model.lm_head is not None:
        arrays["lm_head.weight"] = model.lm_head
    named = {name: np.asarray(x[...]) for name, x in arrays.items()}
    for name, stacked in nnx.to_pure_dict(nnx.state(model.layers)).items():
        part = (
            "mlp."
            if name in ("gate_proj", "up_proj", "down_proj")
            else "self_attn."
            if "proj" in name
            else ""
        )
        named |= {
            f"model.layers.{n}.{part}{name}.weight": np.asarray(x)
            for n, x in enumerate(stacked)
        }
    return named


@pytest.mark.parametrize(
    ("kind", "axes", "layout", "num", "length", "together"),
    [
        ("llama-tied", {"fsdp": 2, "tp": 2, "sp": 2}, "zigzag", 4, 23, 2),
        *long(
            ("llama-tied", {"dp": 2, "tp": 2, "sp": 2}, "striped", 2, 29, 2),
            ("llama", {"fsdp": 2, "tp": 2, "sp": 2}, "zigzag", 4, 23, 1),
        ),
    ],
)
def test_a_step_on_the_mesh_equals_torch_s(
    folders, kind, axes, layout, num, length, together
):
    batch = batch_of(num, length)
    loss, gradients, weights = torch_step(folders[kind], batch)
    mesh = init_mesh(**axes)
    model = load_llama(
        folders[kind],
        mesh,
        layout=layout,
        chunk_tokens=16,
        layers_per_checkpoint=together,
    )
    graph, state = nnx.split(model)
    optimizer = optax.adamw(RATE, weight_decay=0.1, eps=1e-6)

    @jax.jit
    def step(state, batch):
        loss, gradients = jax.value_and_grad(mean_loss(graph, mesh))(state, batch)
        updates, _ = optimizer.update(gradients, optimizer.init(state), state)
        return loss, gradients, optax.apply_updates(state, updates)

    ours = step(state, shard_batch(batch, mesh, layout=layout))
    assert float(ours[0]) == pytest.approx(loss, rel=1e-5)
    for results, expected in ((ours[1], gradients), (ours[2], weights)):
        named = by_name(nnx.merge(graph, results))
        assert named.keys() == expected.keys()
        for name, x in expected.items():
            assert np.linalg.norm(named[name] - x) < 1e-4 * np.linalg.norm(x), name


def test_a_frequent_token_has_its_whole_gradient_in_bfloat16():
    ids = jnp.where(jnp.arange(3000) < 2900, 1, 2)
    table = jnp.ones((4, 8), jnp.bfloat16)
    gradient = jax.grad(lambda table: look_up(table, ids).astype(jnp.float32).sum())(
        table
    )
    expected = jnp.array([0, 2900, 100, 0], jnp.float32).astype(jnp.bfloat16)
    assert gradient.dtype == jnp.bfloat16 and (gradient == expected[:, None]).all()


@pytest.mark.long
def test_folders_and_checkpoints_load_on_other_meshes(folders, tmp_path):
    folder = folders["llama-tied"]
    model = load_llama(folder, init_mesh(fsdp=2, sp=2))
    graph, state = nnx.split(model)
    twice = jax.tree.map(lambda x: 2 * x, state)
    save_llama(nnx.merge(graph, twice), tmp_path / "saved", source=folder)
    saved = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype="auto"
    ).state_dict()
    original = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert saved.keys() == original.keys()
    assert all(
        torch.equal(saved[name], 2 * weight) for name, weight in original.items()
    )
    save_checkpoint(tmp_path / "run", 3, twice)
    like = nnx.split(Llama.initialized(LlamaConfig.read(folder), init_mesh(tp=2)))[1]
    step, restored = load_checkpoint(tmp_path / "run", like)
    assert step == 3
    for x, y, wanted in zip(
        *map(jax.tree.leaves, (restored, twice, like)), strict=True
    ):
        assert np.array_equal(
            np.asarray(x), np.asarray(y)
        ) and x.sharding.is_equivalent_to(wanted.sharding, x.ndim)


def test_meshes_and_batches_that_do_not_fit_are_refused():
    with pytest.raises(rs.LayoutError, match="needs 64 devices, there are 8"):
        init_mesh(sp=64)
    with pytest.raises(
        rs.LayoutError, match="3 sequences does not divide over dp x fsdp = 2"
    ):
        shard_batch(batch_of(3, 8), init_mesh(dp=2))
    with pytest.raises(rs.UnsupportedError, match="does not know attention_mask"):
        shard_batch(
            {**batch_of(2, 8), "attention_mask": np.ones((2, 8))}, init_mesh(dp=2)
        )


@pytest.mark.long
def test_a_mesh_with_other_names_and_order_trains_alike(folders):
    """accelerate's names are recognised; others are said."""
    ours = init_mesh(dp=2, fsdp=2, sp=2)
    devices = ours.devices.reshape(2, 2, 2)
    known = Mesh(devices.transpose(2, 0, 1), ("cp", "dp_replicate", "dp_shard"))
    said = map_mesh(
        Mesh(devices, ("data", "weights", "context")),
        dp="data",
        fsdp="weights",
        sp="context",
    )
    batch, losses = batch_of(4, 16), []
    for mesh in (ours, known, said):
        graph, state = nnx.split(load_llama(folders["llama"], mesh))
        losses.append(
            float(jax.jit(mean_loss(graph, mesh))(state, shard_batch(batch, mesh)))
        )
    assert losses[0] == losses[1] == losses[2]
    with pytest.raises(rs.ConfigError, match=r"no role is known for pp \(2\)"):
        shard_batch(batch, Mesh(devices, ("dp_replicate", "pp", "cp")))
    with pytest.raises(
        rs.ConfigError,
        match=r"context \(2\) has no role; name it as dp or fsdp or tp or sp",
    ):
        map_mesh(Mesh(devices, ("data", "weights", "context")), dp=("data", "weights"))
