"""Hugging Face folders in and out, and checkpoints of a run (orbax), each array read and written where it lives."""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from safetensors import safe_open
from safetensors.flax import save_file

from ringspan.core.errors import ConfigError
from ringspan.jax.llama import Llama, LlamaConfig, put
from ringspan.jax.mesh import own_mesh

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


def load_llama(folder: Path | str, mesh: Mesh, *, dtype: Any = np.float32, **changes: Any) -> Llama:
    """The model of a Hugging Face Llama folder (safetensors), its weights split over the mesh.

    Args:
        folder: a local folder with config.json and one or more .safetensors files.
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
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="flax") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    if not found:
        raise ConfigError(f"{folder}: has no .safetensors file; save the model with save_pretrained")

    def read(key: str, shape: tuple[int, ...]) -> np.ndarray:
        if key not in found:
            raise ConfigError(f"{folder}: has no weight {key}")
        with safe_open(found.pop(key), framework="flax") as opened:
            weight = np.asarray(opened.get_tensor(key)).astype(dtype)
        if weight.shape != shape:
            raise ConfigError(f"{folder}: {key} has shape {weight.shape}, config.json says {shape}")
        return weight

    weights = {}
    for name, shape in config.shapes().items():
        if name in _OUTSIDE:
            whole = read(_OUTSIDE[name], shape)
        else:
            whole = np.stack([read(_layer_key(name, layer), shape[1:]) for layer in range(config.num_hidden_layers)])
        weights[name] = put(name, whole, mesh)
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    left = [key for key in found if not re.search(r"rotary_emb\.inv_freq$", key)]
    if left:
        raise ConfigError(f"{folder}: {left[0]} and {len(left) - 1} more weights have no place in a Llama")
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
    values = {"embed_tokens": model.embed_tokens, "norm": model.norm, "lm_head": model.lm_head}
    for name in model.config.shapes():
        value = values[name] if name in values else getattr(model.layers, name)
        whole = np.asarray(value[...])
        if name in _OUTSIDE:
            weights[_OUTSIDE[name]] = jax.numpy.asarray(whole)
        else:
            weights |= {_layer_key(name, n): jax.numpy.asarray(part) for n, part in enumerate(whole)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as scratch:
        complete = Path(scratch, folder.name)
        complete.mkdir()
        for file in source.iterdir():
            if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".pt"):
                shutil.copy2(file, complete)
        config = json.loads((complete / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = str(model.norm[...].dtype)
        (complete / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
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
    return step, jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in _by_path(like)])


def _by_path(state: Any) -> dict[str, Any]:
    """A tree as a flat table, which names its arrays alike whatever classes the tree is made of."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _manager(folder: Path | str) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(Path(folder).resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def _layer_key(name: str, layer: int) -> str:
    return f"model.layers.{layer}.{_IN_LAYER[name]}.weight"
