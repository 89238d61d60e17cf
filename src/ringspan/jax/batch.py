"""Whole batch (B, S) -> arrays on the mesh: shift labels, add positions, pad, permute, split."""

from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringspan.core.arguments import check_sharding
from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.geometry.layout import Layout
from ringspan.core.names import LayoutName
from ringspan.jax.mesh import BATCH_AXES, own_mesh

# The label of a token without a target, as in transformers and torch.
IGNORED: Final = -100

_KEYS: Final = ("input_ids", "labels", "shift_labels")


def shard(x: object, layout: Layout, dim: int, *, value: float = 0) -> Array:
    """``pad(x, value)[permutation]`` along ``dim``, for a mesh axis to split; LayoutError for another length."""
    x = jnp.asarray(x)
    check_sharding(x.shape, layout, dim)
    if x.shape[dim] != layout.length:
        raise LayoutError(
            f"dimension {dim} has {x.shape[dim]} entries, but must have the layout's {layout.length}"
        )
    width = [(0, 0)] * x.ndim
    width[dim] = (0, layout.padded_length - layout.length)
    return jnp.take(
        jnp.pad(x, width, constant_values=value), layout.permutation, axis=dim
    )


def unshard(x: object, layout: Layout, dim: int) -> Array:
    """Invert ``shard``: in order, without padding; LayoutError unless ``layout.padded_length`` entries come."""
    x = jnp.asarray(x)
    check_sharding(x.shape, layout, dim)
    if x.shape[dim] != layout.padded_length:
        raise LayoutError(
            f"dimension {dim} has {x.shape[dim]} entries, but must have the layout's {layout.padded_length}"
        )
    return jnp.take(x, layout.inverse[: layout.length], axis=dim)


def shard_batch(
    batch: Mapping[str, Any], mesh: Mesh, *, layout: LayoutName = "zigzag"
) -> dict[str, Array]:
    """Return a whole batch as arrays on the mesh, sequences split over dp and fsdp, tokens over sp.

    Labels are shifted before the permutation, so each token knows its true successor; padding comes last, unseen by
    real tokens, with the label -100.

    Args:
        batch: ``input_ids`` (B, S), and unshifted ``labels`` (B, S) or ``shift_labels`` (B, S), each token's target.
        mesh: from ``init_mesh``, or with the axes that ``map_mesh`` names.
        layout: as the model's.

    Returns:
        ``input_ids``, ``position_ids`` and ``shift_labels``, each int32 (B, padded S).

    Raises:
        UnsupportedError: keys, shapes or numbers that cannot be honoured, by name.
        LayoutError: a batch that dp x fsdp does not divide.
    """
    mesh = own_mesh(mesh)
    _check_keys(batch)
    for name, value in batch.items():
        _check_numbers(name, value)
    tokens = np.asarray(batch["input_ids"])
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise UnsupportedError(
            f"input_ids must be (batch, tokens), got shape {tokens.shape}"
        )
    if tokens.size and tokens.min() < 0:
        raise UnsupportedError(
            f"input_ids has {tokens.min()}, which is no entry of a vocabulary; give numbers from 0"
        )
    targets = _targets_of(batch, tokens.shape)
    replicas = mesh.shape["dp"] * mesh.shape["fsdp"]
    if len(tokens) % replicas:
        raise LayoutError(
            f"a batch of {len(tokens)} sequences does not divide over dp x fsdp = {replicas} devices, but must"
        )
    split = Layout(layout, tokens.shape[1], mesh.shape["sp"])
    positions = np.broadcast_to(split.permutation, (len(tokens), split.padded_length))
    arrays = {
        "input_ids": shard(tokens, split, 1),
        "position_ids": positions,
        "shift_labels": shard(targets, split, 1, value=IGNORED),
    }
    sharding = NamedSharding(mesh, P(BATCH_AXES, "sp"))
    return {
        name: jax.device_put(np.asarray(x, np.int32), sharding)
        for name, x in arrays.items()
    }


def _check_keys(batch: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a key that a batch cannot have, or lacks."""
    unknown = sorted(set(batch) - set(_KEYS))
    if unknown:
        raise UnsupportedError(
            f"shard_batch does not know {', '.join(unknown)}; it takes {', '.join(_KEYS)}"
        )
    if "input_ids" not in batch:
        raise UnsupportedError("shard_batch needs input_ids")


def _check_numbers(name: str, value: object) -> None:
    """Raise UnsupportedError unless a value is an array of whole numbers that fit int32."""
    bounds = np.iinfo(np.int32)
    try:
        numbers = np.asarray(value)
    except ValueError:
        raise UnsupportedError(
            f"{name} has sequences of different lengths; pad them to one length"
        ) from None
    if not np.issubdtype(numbers.dtype, np.integer):
        raise UnsupportedError(f"{name} must be integers, got {numbers.dtype}")
    if numbers.size and not bounds.min <= numbers.min() <= numbers.max() <= bounds.max:
        raise UnsupportedError(
            f"{name} must fit int32, got numbers from {numbers.min()} to {numbers.max()}"
        )


def _targets_of(batch: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
    """Return each token's target, from shifted or unshifted labels; UnsupportedError unless they agree."""
    if "shift_labels" in batch:
        targets = np.asarray(batch["shift_labels"])
    elif "labels" in batch:
        labels = np.asarray(batch["labels"])
        targets = np.concatenate(
            (labels[:, 1:], np.full_like(labels[:, :1], IGNORED)), 1
        )
    else:
        raise UnsupportedError(
            "the batch has neither labels nor shift_labels; give one of them"
        )
    if targets.shape != shape:
        raise UnsupportedError(
            f"labels have shape {targets.shape}, input_ids {shape}; give both the same"
        )
    if (
        "shift_labels" in batch
        and "labels" in batch
        and (np.asarray(batch["labels"])[:, 1:] != targets[:, :-1]).any()
    ):
        raise UnsupportedError(
            "labels, shifted by one, are not shift_labels; give one of them"
        )
    return targets
