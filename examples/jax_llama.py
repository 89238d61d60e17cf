"""A small Llama in Flax NNX, written for one device of a mesh: RMSNorm, RoPE, grouped heads, gated MLP, on the ring;
Hugging Face folders in and out; and checkpoints of a run (orbax), each array read and written where it lives.

Copy it, and make your model of it: it needs ringspan[jax], flax and orbax-checkpoint.

Weights have the names and the orientation (out, in) of Hugging Face's, the layers stacked along a leading dimension.
Inside ``shard_map`` each is this device's part of it, as ``SPECS`` says; a layer gathers its own over fsdp as it runs.

B batch, T local tokens, C hidden size, H query heads, G key/value heads, D head size, I width of the MLP, V vocabulary,
L layers. With tp, H, G, I and V are the device's own share.
"""

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.flax import save_file

from ringspan import ConfigError, LayoutError, UnsupportedError
from ringspan.core.files.named import MODEL_CONFIG, read_small
from ringspan.core.files.weights import refuse_beside, weights_in
from ringspan.core.names import JaxKernelName, LayoutName
from ringspan.jax import blockwise_cross_entropy, blockwise_feedforward, ring_attention
from ringspan.jax.attention import SAVED_NAME
from ringspan.jax.kernels.xla import accumulation_dtype, varying_like
from ringspan.jax.mesh import BATCH_AXES, TOKEN_AXES, own_mesh

SPECS: Final = {
    "embed_tokens": P("tp", "fsdp"),
    "q_proj": P(None, "tp", "fsdp"),
    "k_proj": P(None, "tp", "fsdp"),
    "v_proj": P(None, "tp", "fsdp"),
    "o_proj": P(None, "fsdp", "tp"),
    "gate_proj": P(None, "tp", "fsdp"),
    "up_proj": P(None, "tp", "fsdp"),
    "down_proj": P(None, "fsdp", "tp"),
    "input_layernorm": P(),
    "post_attention_layernorm": P(),
    "norm": P(),
    "lm_head": P("tp", "fsdp"),
}
_IN_LAYER: Final = {
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}
_OUTSIDE: Final = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The values of a Hugging Face ``config.json`` that the model needs, and how it computes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    layout: LayoutName = "zigzag"
    chunk_tokens: int = 1024
    """Tokens of the feed-forward and of the loss that are computed at once."""
    layers_per_checkpoint: int = 1
    """Consecutive layers of which only the first keeps its input, see
    ``ringspan.torch.model.memory.segments``; it divides all."""
    kernel: JaxKernelName = "xla"
    """Name of the kernel of a block, see ``ring_attention``."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` where ``layers_per_checkpoint`` does not divide the layers."""
        size = self.layers_per_checkpoint
        if size < 1 or self.num_hidden_layers % size:
            raise ConfigError(
                f"layers_per_checkpoint={size} does not divide {self.num_hidden_layers} layers"
            )

    @staticmethod
    def read(folder: Path | str, **changes: Any) -> "LlamaConfig":
        """The configuration of a Hugging Face folder.

        Raises:
            ConfigError: no readable config.json.
            UnsupportedError: not a Llama, or one with biases, another activation or scaled RoPE.
        """
        try:
            values = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder}: no readable config.json ({error}); give a Hugging Face model folder"
            ) from None
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        refused = {
            "model_type": (values.get("model_type"), "llama"),
            "hidden_act": (values.get("hidden_act", "silu"), "silu"),
            "attention_bias": (bool(values.get("attention_bias")), False),
            "mlp_bias": (bool(values.get("mlp_bias")), False),
            "rope_type": (kind, "default"),
        }
        for name, (value, supported) in refused.items():
            if value != supported:
                raise UnsupportedError(
                    f"{folder}: {name} = {value!r} is not supported in JAX, only {supported!r}"
                )
        heads = values["num_attention_heads"]
        return LlamaConfig(
            **{
                name: values[name]
                for name in (
                    "vocab_size",
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                )
            },
            num_attention_heads=heads,
            num_key_value_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            rope_theta=float(
                rope.get("rope_theta") or values.get("rope_theta") or 10_000.0
            ),
            tie_word_embeddings=bool(values.get("tie_word_embeddings")),
            **changes,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of each weight, layers stacked."""
        layers, hidden, width = (
            self.num_hidden_layers,
            self.hidden_size,
            self.intermediate_size,
        )
        queries, keys = (
            self.num_attention_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens": (self.vocab_size, hidden),
            "q_proj": (layers, queries, hidden),
            "k_proj": (layers, keys, hidden),
            "v_proj": (layers, keys, hidden),
            "o_proj": (layers, hidden, queries),
            "gate_proj": (layers, width, hidden),
            "up_proj": (layers, width, hidden),
            "down_proj": (layers, hidden, width),
            "input_layernorm": (layers, hidden),
            "post_attention_layernorm": (layers, hidden),
            "norm": (hidden,),
        }
        return (
            shapes
            if self.tie_word_embeddings
            else shapes | {"lm_head": (self.vocab_size, hidden)}
        )

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh that does not divide the weights.

        Raises:
            LayoutError: naming the value.
        """
        whole = {
            "num_attention_heads": "tp",
            "num_key_value_heads": "tp",
            "intermediate_size": "tp",
            "vocab_size": "tp",
        }
        for name, axis in {**whole, "hidden_size": "fsdp"}.items():
            if getattr(self, name) % mesh.shape[axis]:
                raise LayoutError(
                    f"{name} = {getattr(self, name)} does not divide over {axis} = {mesh.shape[axis]}"
                )


class Layer(nnx.Module):
    """One decoder layer, or all of them stacked: then only ``nnx.split`` and a scan make sense of it."""

    def __init__(self, config: LlamaConfig, weights: dict[str, Array]) -> None:
        self.config = config
        for name in (
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ):
            setattr(self, name, nnx.Param(weights[name]))
        self.input_layernorm = nnx.Param(weights["input_layernorm"])
        self.post_attention_layernorm = nnx.Param(weights["post_attention_layernorm"])

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        """(B, T, C) -> (B, T, C), with the rotation of each position (B, 1, T, D)."""
        x = x + self._attention(
            _normalized(x, self.input_layernorm[...], self.config.rms_norm_eps),
            cos,
            sin,
        )
        y = _normalized(x, self.post_attention_layernorm[...], self.config.rms_norm_eps)
        gate, up = gathered(self.gate_proj[...], 1), gathered(self.up_proj[...], 1)
        down = gathered(self.down_proj[...], 0)
        mlp = lambda rows: (jax.nn.silu(rows @ gate.T) * (rows @ up.T)) @ down.T  # noqa: E731
        return x + lax.psum(
            blockwise_feedforward(mlp, y, chunk_tokens=self.config.chunk_tokens), "tp"
        )

    def _attention(self, x: Array, cos: Array, sin: Array) -> Array:
        def heads(weight: Array) -> Array:
            y = x @ gathered(weight, 1).T
            return y.reshape(*y.shape[:2], -1, self.config.head_dim).swapaxes(1, 2)

        q, k, v = (
            heads(weight[...]) for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (_rotated(x, cos, sin) for x in (q, k))
        out = ring_attention(
            q, k, v, layout=self.config.layout, kernel=self.config.kernel
        )
        out = out.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        return lax.psum(out @ gathered(self.o_proj[...], 0).T, "tp")


class Llama(nnx.Module):
    """The causal language model. Its arrays are split over a mesh; ``__call__`` wants a device's parts."""

    def __init__(self, config: LlamaConfig, weights: dict[str, Array]) -> None:
        self.config = config
        self.embed_tokens = nnx.Param(weights["embed_tokens"])
        self.layers = Layer(config, weights)
        self.norm = nnx.Param(weights["norm"])
        self.lm_head = (
            None if config.tie_word_embeddings else nnx.Param(weights["lm_head"])
        )

    @staticmethod
    def initialized(config: LlamaConfig, mesh: Mesh, seed: int = 0) -> "Llama":
        """New weights, normal with deviation 0.02 as Hugging Face draws them, on the mesh."""
        mesh = own_mesh(mesh)
        config.check_mesh(mesh)
        generator = np.random.default_rng(seed)
        weights = {
            name: np.ones(shape, np.float32)
            if "norm" in name
            else generator.standard_normal(shape, np.float32) * np.float32(0.02)
            for name, shape in config.shapes().items()
        }
        return Llama(config, {name: put(name, x, mesh) for name, x in weights.items()})

    def __call__(self, input_ids: Array, position_ids: Array) -> Array:
        """Final hidden states (B, T, C) of the local tokens; inside ``shard_map`` over a mesh of ``init_mesh``."""
        config = self.config
        x = self._embedded(input_ids)
        cos, sin = _rotation(position_ids, config.head_dim, config.rope_theta, x.dtype)
        graph, stacked = nnx.split(self.layers)
        policy = jax.checkpoint_policies.save_only_these_names(SAVED_NAME)

        @partial(jax.checkpoint, policy=policy)
        def step(x: Array, layer: Any) -> tuple[Array, None]:
            return nnx.merge(graph, layer)(x, cos, sin), None

        @partial(jax.checkpoint, policy=policy)
        def segment(x: Array, layers: Any) -> tuple[Array, None]:
            return lax.scan(step, x, layers)

        if config.layers_per_checkpoint == 1:
            x, _ = lax.scan(step, x, stacked)
        else:
            shape = -1, config.layers_per_checkpoint
            x, _ = lax.scan(
                segment,
                x,
                jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), stacked),
            )
        return _normalized(x, self.norm[...], config.rms_norm_eps)

    def loss_sum(
        self, input_ids: Array, position_ids: Array, shift_labels: Array
    ) -> Array:
        """Summed cross-entropy of the local tokens."""
        hidden = self(input_ids, position_ids)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return blockwise_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            gathered(head[...], 1),
            shift_labels.reshape(-1),
            chunk_tokens=self.config.chunk_tokens,
            vocabulary_axis="tp",
        )

    def _embedded(self, input_ids: Array) -> Array:
        """Each device of tp looks up the tokens whose rows it has."""
        table = gathered(self.embed_tokens[...], 1)
        local = input_ids - lax.axis_index("tp") * len(table)
        is_here = (local >= 0) & (local < len(table))
        rows = look_up(varying_like(table, local), jnp.where(is_here, local, 0))
        is_known = lax.psum(is_here.astype(jnp.int32), "tp")[..., None] > 0
        # Of an id outside the vocabulary, which nobody can refuse here, NaN rather than some other token.
        return jnp.where(
            is_known, lax.psum(jnp.where(is_here[..., None], rows, 0), "tp"), jnp.nan
        )


@jax.custom_vjp
def look_up(table: Array, ids: Array) -> Array:
    """``table[ids]``, whose gradient adds up in float32: in bfloat16 a sum of equal terms ends at 256 of them."""
    return table[ids]


def _look_up_forward(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return table[ids], (table, ids)


def _look_up_backward(kept: tuple[Array, Array], d_rows: Array) -> tuple[Array, None]:
    table, ids = kept
    dtype = accumulation_dtype(table.dtype)
    sums = (
        varying_like(jnp.zeros(table.shape, dtype), d_rows)
        .at[ids]
        .add(d_rows.astype(dtype))
    )
    return sums.astype(table.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def put(name: str, weight: Any, mesh: Mesh) -> Array:
    """A whole weight, split over the mesh."""
    return jax.device_put(
        weight, jax.sharding.NamedSharding(own_mesh(mesh), SPECS[name])
    )


def specs(tree: Any) -> Any:
    """The split of each array of ``nnx.split(model)[1]``, or of an optimizer's state for it."""
    # Counters and the like are no weights: every device has them.
    return jax.tree.map_with_path(lambda path, _: SPECS.get(_name(path), P()), tree)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """``specs`` on a mesh, as ``jax.jit(optimizer.init, out_shardings=...)`` wants them."""
    mesh = own_mesh(mesh)
    return jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec), specs(tree)
    )


def mean_loss(graph: Any, mesh: Mesh) -> Any:
    """``loss(state, batch)``: the mean over all valid target tokens of the batch, wherever they are.

    ``graph`` and ``state`` are ``nnx.split(model)``, ``batch`` is from ``shard_batch``. Differentiate and jit it as any
    function; gradients come out split as the weights are.
    """
    mesh = own_mesh(mesh)

    def local(state: Any, batch: dict[str, Array]) -> Array:
        total = lax.psum(nnx.merge(graph, state).loss_sum(**batch), TOKEN_AXES)
        count = lax.psum((batch["shift_labels"] >= 0).sum(), TOKEN_AXES)
        return total / jnp.maximum(count, 1)

    def loss(state: Any, batch: dict[str, Array]) -> Array:
        split = jax.tree.map(lambda _: P(BATCH_AXES, "sp"), batch)
        return jax.shard_map(
            local, mesh=mesh, in_specs=(specs(state), split), out_specs=P()
        )(state, batch)

    return loss


def load_llama(
    folder: Path | str, mesh: Mesh, *, dtype: Any = np.float32, **changes: Any
) -> Llama:
    """The model of a Hugging Face Llama folder (safetensors), its weights split over the mesh.

    Args:
        folder: a local folder with config.json and weights in safetensors, of which those are read that transformers
            would.
        mesh: as ``shard_batch`` takes.
        dtype: of the weights.
        changes: ``layout``, ``chunk_tokens``, ``layers_per_checkpoint`` and ``kernel`` of ``LlamaConfig``.

    Raises:
        ConfigError: no such files, or weights that are missing, left over or of another shape.
        UnsupportedError, LayoutError: as ``LlamaConfig.read`` and ``LlamaConfig.check_mesh``.
    """
    config = LlamaConfig.read(folder, **changes)
    mesh = own_mesh(mesh)
    config.check_mesh(mesh)
    found: dict[str, Path] = {}
    try:
        names = {path.name for path in Path(folder).iterdir()}
        refuse_beside(names, adapter=False)
        named = json.loads(read_small(Path(folder, MODEL_CONFIG))).get(
            "transformers_weights"
        )
        files = weights_in(
            names, lambda name: read_small(Path(folder, name)), named=named
        )
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    for file in (Path(folder, name) for name in files):
        with safe_open(file, framework="flax") as opened:
            found.update(dict.fromkeys(opened.keys(), file))

    def read(key: str, shape: tuple[int, ...]) -> np.ndarray:
        if key not in found:
            raise ConfigError(f"{folder}: has no weight {key}")
        with safe_open(found.pop(key), framework="flax") as opened:
            weight = np.asarray(opened.get_tensor(key)).astype(dtype)
        if weight.shape != shape:
            raise ConfigError(
                f"{folder}: {key} has shape {weight.shape}, config.json says {shape}"
            )
        return weight

    weights = {}
    for name, shape in config.shapes().items():
        if name in _OUTSIDE:
            whole = read(_OUTSIDE[name], shape)
        else:
            whole = np.stack(
                [
                    read(_layer_key(name, layer), shape[1:])
                    for layer in range(config.num_hidden_layers)
                ]
            )
        weights[name] = put(name, whole, mesh)
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    left = [key for key in found if not re.search(r"rotary_emb\.inv_freq$", key)]
    if left:
        raise ConfigError(
            f"{folder}: {left[0]} and {len(left) - 1} more weights have no place in a Llama"
        )
    return Llama(config, weights)


def save_llama(model: Llama, folder: Path | str, *, source: Path | str) -> None:
    """Write a Hugging Face folder that ``from_pretrained`` opens; a folder of that name is replaced.

    Args:
        model: gathered on this host, one weight at a time.
        folder: where; complete, or not there at all.
        source: the folder that the model was loaded from, for its config and tokenizer.
    """
    folder, source = Path(folder), Path(source)
    weights: dict[str, jax.Array] = {}
    values = {
        "embed_tokens": model.embed_tokens,
        "norm": model.norm,
        "lm_head": model.lm_head,
    }
    for name in model.config.shapes():
        value = values[name] if name in values else getattr(model.layers, name)
        whole = np.asarray(value[...])
        if name in _OUTSIDE:
            weights[_OUTSIDE[name]] = jax.numpy.asarray(whole)
        else:
            weights |= {
                _layer_key(name, n): jax.numpy.asarray(part)
                for n, part in enumerate(whole)
            }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.tmp-", dir=folder.parent
    ) as scratch:
        complete = Path(scratch, folder.name)
        complete.mkdir()
        for file in source.iterdir():
            if (
                file.is_file()
                and ".safetensors" not in file.name
                and file.suffix not in (".bin", ".pt")
            ):
                shutil.copy2(file, complete)
        config = json.loads((complete / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = str(model.norm[...].dtype)
        (complete / "config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
        save_file(weights, complete / "model.safetensors", metadata={"format": "pt"})
        if folder.exists():
            folder.rename(Path(scratch, "replaced"))
        complete.rename(folder)


def save_checkpoint(folder: Path | str, step: int, state: Any) -> None:
    """Write the state of a run (any pytree of arrays) as checkpoint ``step``; the last two are kept."""
    with _manager(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave(_by_path(state)))


def load_checkpoint(folder: Path | str, like: Any) -> tuple[int, Any]:
    """The newest checkpoint's step and state; ``like`` gives structure, dtypes and the split, on any mesh.

    Raises:
        ConfigError: there is no checkpoint.
    """
    with _manager(folder) as manager:
        step = manager.latest_step()
        if step is None:
            raise ConfigError(f"{folder}: has no checkpoint")
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_path(like))
        arrays = manager.restore(step, args=ocp.args.StandardRestore(wanted))
    return step, jax.tree.unflatten(
        jax.tree.structure(like), [arrays[name] for name in _by_path(like)]
    )


def _by_path(state: Any) -> dict[str, Any]:
    """A tree as a flat table, which names its arrays alike whatever classes the tree is made of."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def _manager(folder: Path | str) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        Path(folder).resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )


def _layer_key(name: str, layer: int) -> str:
    return f"model.layers.{layer}.{_IN_LAYER[name]}.weight"


def gathered(weight: Array, axis: int) -> Array:
    """A weight of which each device of fsdp holds a part along ``axis``; its gradient is summed and split again."""
    return lax.all_gather(weight, "fsdp", axis=axis, tiled=True)


def _name(path: Any) -> str:
    return next(
        (key.key for key in reversed(path) if getattr(key, "key", None) in SPECS), ""
    )


def _normalized(x: Array, weight: Array, eps: float) -> Array:
    y = x.astype(jnp.float32)
    return weight * (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)).astype(
        x.dtype
    )


def _rotation(
    position_ids: Array, size: int, theta: float, dtype: Any
) -> tuple[Array, Array]:
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = position_ids[:, None, :, None].astype(jnp.float32) * jnp.concatenate(
        (frequencies, frequencies)
    )
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate((-second, first), -1) * sin
