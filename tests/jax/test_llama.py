"""The JAX Llama against Hugging Face's on one process: loss, gradients, a step, and folders in and out."""

import json

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
from ringspan.core.errors import ConfigError
from ringspan.jax import init_mesh, map_mesh, shard_batch
from ringspan.jax.checkpoint import load_checkpoint, load_llama, save_checkpoint, save_llama
from ringspan.jax.llama import Llama, LlamaConfig, look_up, mean_loss
from tests.jax.test_program import permutes
from tests.long import long
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
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").float()
    loss = model(**{name: torch.from_numpy(x) for name, x in batch.items()}).loss
    loss.backward()
    gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, eps=1e-6).step()
    return float(loss.detach()), gradients, {name: p.detach().numpy() for name, p in model.named_parameters()}


def by_name(model: Llama) -> dict[str, np.ndarray]:
    """Weights, or gradients in their place, under Hugging Face's names."""
    arrays = {"model.embed_tokens.weight": model.embed_tokens, "model.norm.weight": model.norm}
    if model.lm_head is not None:
        arrays["lm_head.weight"] = model.lm_head
    named = {name: np.asarray(x[...]) for name, x in arrays.items()}
    for name, stacked in nnx.to_pure_dict(nnx.state(model.layers)).items():
        part = "mlp." if name in ("gate_proj", "up_proj", "down_proj") else "self_attn." if "proj" in name else ""
        named |= {f"model.layers.{n}.{part}{name}.weight": np.asarray(x) for n, x in enumerate(stacked)}
    return named


@pytest.mark.parametrize(
    ("kind", "axes", "layout", "num", "length"),
    [
        *long(("llama", {}, "zigzag", 2, 37), ("llama", {"sp": 4}, "zigzag", 1, 41)),
        ("llama-tied", {"dp": 2, "tp": 2, "sp": 2}, "striped", 2, 29),
        ("llama", {"fsdp": 2, "tp": 2, "sp": 2}, "zigzag", 4, 23),
    ],
)
def test_a_step_on_the_mesh_equals_torch_s(folders, kind, axes, layout, num, length):
    batch = batch_of(num, length)
    loss, gradients, weights = torch_step(folders[kind], batch)
    mesh = init_mesh(**axes)
    graph, state = nnx.split(load_llama(folders[kind], mesh, layout=layout, chunk_tokens=16))
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


def test_layers_that_share_an_input_have_the_same_gradients_in_less_memory_and_the_ring_does_not_run_again():
    mesh, length = init_mesh(sp=2), 1024
    batch = shard_batch(batch_of(1, length), mesh)
    results = []
    for layers in (1, 3):
        sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 12}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
        rest = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "chunk_tokens": 64}
        graph, state = nnx.split(
            Llama.initialized(LlamaConfig(**sizes, **heads, **rest, layers_per_checkpoint=layers), mesh)
        )
        step = jax.jit(jax.value_and_grad(mean_loss(graph, mesh))).lower(state, batch).compile()
        results.append((*step(state, batch), len(permutes(step.as_text())), step.memory_analysis().temp_size_in_bytes))
    (loss, gradients, sent, held), (same_loss, same_gradients, sent_too, held_now) = results
    assert float(same_loss) == pytest.approx(float(loss), rel=1e-6)
    for g, wanted in zip(jax.tree.leaves(same_gradients), jax.tree.leaves(gradients), strict=True):
        assert np.linalg.norm(g - wanted) < 1e-5 * np.linalg.norm(wanted)
    assert sent == sent_too > 0
    # Twelve inputs become six; the weights and attention's results of a segment are there twice.
    assert held - held_now > 2 * length / 2 * 64 * 4


def test_a_segment_of_layers_that_does_not_divide_them_is_refused(folders):
    with pytest.raises(rs.ConfigError, match="layers_per_checkpoint=3 does not divide 2 layers"):
        LlamaConfig.read(folders["llama"], layers_per_checkpoint=3)


def test_a_token_that_occurs_often_has_its_whole_gradient_in_bfloat16():
    ids = jnp.where(jnp.arange(3000) < 2900, 1, 2)
    table = jnp.ones((4, 8), jnp.bfloat16)
    gradient = jax.grad(lambda table: look_up(table, ids).astype(jnp.float32).sum())(table)
    expected = jnp.array([0, 2900, 100, 0], jnp.float32).astype(jnp.bfloat16)
    assert gradient.dtype == jnp.bfloat16 and (gradient == expected[:, None]).all()


def test_a_saved_folder_opens_in_transformers_with_the_same_weights(folders, tmp_path):
    for kind, folder in folders.items():
        model = load_llama(folder, init_mesh(fsdp=2, sp=2))
        state = nnx.state(model)
        nnx.update(model, jax.tree.map(lambda x: 2 * x, state))
        save_llama(model, tmp_path / kind, source=folder)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype="auto").state_dict()
        original = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert saved.keys() == original.keys()
        for name, weight in original.items():
            assert torch.equal(saved[name], 2 * weight), name


def test_a_checkpoint_resumes_on_another_mesh(folders, tmp_path):
    saved = nnx.split(load_llama(folders["llama"], init_mesh(fsdp=2, sp=2)))[1]
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, jax.tree.map(lambda x, step=step: x * step, saved))
    like = nnx.split(Llama.initialized(LlamaConfig.read(folders["llama"]), init_mesh(tp=2)))[1]
    step, restored = load_checkpoint(tmp_path, like)
    assert step == 3
    pairs = list(zip(jax.tree.leaves(restored), jax.tree.leaves(saved), jax.tree.leaves(like), strict=True))
    assert len(pairs) == 12
    for x, y, wanted in pairs:
        assert np.array_equal(np.asarray(x), np.asarray(y) * 3)
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["2", "3"]


def test_half_precision_weights_load(folders, tmp_path):
    build("llama", vocab_size=VOCAB).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    model = load_llama(tmp_path / "half", init_mesh(), dtype=jnp.bfloat16)
    assert model.layers.q_proj[...].dtype == jnp.bfloat16


def test_ids_outside_of_the_vocabulary_are_no_other_token(folders):
    """Under jit nobody can refuse them, so that what they make is NaN."""
    mesh = init_mesh(tp=2, sp=2)
    graph, state = nnx.split(load_llama(folders["llama"], mesh))
    loss, batch = jax.jit(mean_loss(graph, mesh)), shard_batch(batch_of(2, 16), mesh)
    for wrong in (-1, VOCAB):
        assert np.isnan(loss(state, batch | {"input_ids": batch["input_ids"].at[0, 3].set(wrong)}))
    assert np.isfinite(loss(state, batch))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type = 'mistral'"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
    ],
)
def test_other_models_are_refused(folders, tmp_path, changes, message):
    values = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(rs.UnsupportedError, match=message):
        load_llama(tmp_path, init_mesh())


def test_missing_files_and_meshes_that_do_not_fit_are_refused(folders, tmp_path):
    with pytest.raises(rs.ConfigError, match=r"no readable config\.json"):
        load_llama(tmp_path, init_mesh())
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    with pytest.raises(rs.ConfigError, match=r"no \.safetensors file"):
        load_llama(tmp_path, init_mesh())
    with pytest.raises(rs.LayoutError, match=r"num_attention_heads = 4 does not divide over tp = 8"):
        load_llama(folders["llama"], init_mesh(tp=8))
    with pytest.raises(rs.LayoutError, match="needs 64 devices, there are 8"):
        init_mesh(sp=64)
    with pytest.raises(rs.ConfigError, match="has no checkpoint"):
        load_checkpoint(tmp_path / "none", {})
    with pytest.raises(rs.LayoutError, match="3 sequences does not divide over dp x fsdp = 2"):
        shard_batch(batch_of(3, 8), init_mesh(dp=2))
    with pytest.raises(rs.UnsupportedError, match="does not know attention_mask"):
        shard_batch({**batch_of(2, 8), "attention_mask": np.ones((2, 8))}, init_mesh(dp=2))


def test_a_mesh_with_other_names_and_order_trains_alike(folders):
    """accelerate's names are recognised; others are said."""
    ours = init_mesh(dp=2, fsdp=2, sp=2)
    devices = ours.devices.reshape(2, 2, 2)
    known = Mesh(devices.transpose(2, 0, 1), ("cp", "dp_replicate", "dp_shard"))
    said = map_mesh(Mesh(devices, ("data", "weights", "context")), dp="data", fsdp="weights", sp="context")
    batch, losses = batch_of(4, 16), []
    for mesh in (ours, known, said):
        graph, state = nnx.split(load_llama(folders["llama"], mesh))
        losses.append(float(jax.jit(mean_loss(graph, mesh))(state, shard_batch(batch, mesh))))
    assert losses[0] == losses[1] == losses[2]
    with pytest.raises(ConfigError, match=r"no role is known for pp \(2\)"):
        shard_batch(batch, Mesh(devices, ("dp_replicate", "pp", "cp")))
    with pytest.raises(ConfigError, match=r"context \(2\) has no role; name it as dp or fsdp or tp or sp"):
        map_mesh(Mesh(devices, ("data", "weights", "context")), dp=("data", "weights"))
