"""A sharded model's weights for another program: whole, one at a time, under the names of its checkpoint."""

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.errors import ConfigError, RingspanError, UnsupportedError
from ringspan.torch.model.adapters import base_of, is_peft, names_of_adapter
from ringspan.torch.model.consistency.calls import Call, check_call, meeting
from ringspan.torch.model.consistency.loop_watch import in_call
from ringspan.torch.model.consistency.optimizers import optimizer_facts
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.memory.sharding import settle
from ringspan.torch.model.merged import has_wrapped, plain_config, plain_weights
from ringspan.torch.model.weights.deferred import release, release_after, whole
from ringspan.torch.model.weights.shards import (
    Readers,
    as_stored,
    saved_names,
    shards_of,
)
from ringspan.torch.model.weights.writing import (
    MAX_SHARD_SIZE,
    WeightsPlan,
    missing_room,
    write_weights,
)

_CALL: Final = "handing over weights"
# Ranks meet after so many bytes, so that none runs ahead of one that waits for another program.
_BUCKET_BYTES: Final = 1 << 28


class WeightMeta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class NamedWeights:
    """The weights of a model on a ring by name, read again in each iteration; what ``named_weights`` returns.

    An iteration is collective: all ranks walk through it together, and get tensors on the device ``meta`` if
    they asked for no numbers. A rank that leaves it early ends it for all: the others raise at the end of their bucket.
    """

    def __init__(self, base: Any, tensors: dict[str, Any], readers: Readers) -> None:
        self._base, self._tensors, self._readers = base, tensors, readers
        self._release_after = release_after(tensors)

    def metadata(self) -> list[WeightMeta]:
        """Return name, dtype and shape of each tensor in the order of an iteration, without a message."""
        return [
            WeightMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        ]

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its whole tensor, which later iterations do not change."""
        self._begin()
        buckets = [*self._buckets()]
        for names in buckets:
            for place, name in enumerate(names):
                tensor = self._read(name)
                try:
                    yield name, tensor
                except GeneratorExit:
                    # The others wait for this rank's parts of the bucket, and for a word at its end.
                    self._leave(names[place + 1 :], name)
                    raise
                del tensor
            self._meet()

    def write(self, folder: Path | None) -> None:
        """Write the tensors into a folder as safetensors files with their index and the config; every rank calls it.

        The first rank gives the folder. Raises OSError there if the disk is full, and PeerMismatch on the others.
        """
        self._begin()
        mesh, plan = self._readers.mesh, WeightsPlan(self._tensors, MAX_SHARD_SIZE)

        def vote(what: str, error: Exception | None) -> None:
            check_call(mesh, Call(what, error=error))

        with in_call(_CALL):
            with meeting(mesh, _CALL):
                if folder is not None:
                    if problem := missing_room(folder, plan.num_bytes):
                        raise OSError(errno.ENOSPC, problem)
                    plain_config(self._base).save_pretrained(folder)
            write_weights(plan, folder, vote)
            with meeting(mesh, _CALL):
                if folder is not None:
                    plan.write_index(
                        folder, sum(x.numel() for x in self._tensors.values())
                    )

    def _begin(self) -> None:
        for tensor in self._tensors.values():
            release(tensor)
        # A forward pass without a backward pass may have left whole copies of the outermost weights.
        with in_call(_CALL), meeting(self._readers.mesh, _CALL) as facts:
            settle(self._base)
            facts.alike = optimizer_facts(self._base)

    def _buckets(self) -> Iterator[list[str]]:
        names, size = list[str](), 0
        for name, tensor in self._tensors.items():
            names.append(name)
            size += tensor.numel() * tensor.dtype.itemsize
            if size >= _BUCKET_BYTES:
                yield names
                names, size = [], 0
        yield names

    def _read(self, name: str) -> Tensor:
        with in_call(_CALL), torch.no_grad():
            tensor = whole(self._tensors[name]).contiguous()
        for source in self._release_after.get(name, ()):
            source.release()
        return tensor

    def _meet(self, error: Exception | None = None) -> None:
        with in_call(_CALL):
            check_call(self._readers.mesh, Call(_CALL, error=error))

    def _leave(self, rest: list[str], last: str) -> None:
        for name in rest:
            self._read(name)
        left = ConfigError(
            f"rank {dist.get_rank()} stopped reading the weights after {last}; read all of them on every rank"
        )
        with suppress(RingspanError):  # this rank has a reason of its own
            self._meet(left)


def named_weights(
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    merge: bool = True,
    everywhere: bool = False,
    only: Literal["adapter"] | None = None,
) -> NamedWeights:
    """Return a model's whole weights by the names of its checkpoint, for another program; every rank calls it.

    They equal the files of ``save_pretrained`` bit for bit: tied weights once, experts as the checkpoint has them.
    Adapters are merged into copies by PEFT's arithmetic, packed weights unpacked; no shard changes. In addition to
    the model a rank holds at most two of the largest tensors, or three of a weight that PEFT merges.

        for name, tensor in rs.named_weights(model): ...  # on every rank; numbers on the first

    Args:
        model: one on a ring, or PEFT's around it.
        dtype: for all parameters; their own when None.
        merge: False leaves adapters out.
        everywhere: numbers on every rank, not on the first alone.
        only: ``"adapter"`` gives only the active adapter, under the names of PEFT's files.

    Returns:
        A re-iterable of (name, tensor) on the model's device, whose ``metadata()`` gives (name, dtype, shape).

    Raises:
        ConfigError: a model that is not on a ring, ``only`` for a model without an adapter, or an unknown ``only``.
        UnsupportedError: a layer that PEFT cannot merge, or adapters that the model holds itself.
    """
    base: Any = base_of(model)
    mesh = getattr(base, "ring_mesh", None)
    if mesh is None:
        raise ConfigError(
            f"{class_name(base)} is not on a ring; call parallelize first, or read its state_dict()"
        )
    with in_call(_CALL), meeting(mesh, _CALL) as facts:
        _refuse(model, base, dtype, only)
        facts.alike = {
            "dtype": str(dtype),
            "merge": merge,
            "everywhere": everywhere,
            "only": only,
        }
        settle(base)
    readers = Readers(mesh, everywhere=everywhere, on_host=False)
    with in_call(_CALL):
        if only == "adapter":
            tensors: dict[str, Any] = _adapter(model, base, readers, dtype)
        elif has_wrapped(model):
            config = plain_config(base)
            plain, found = plain_weights(model, config, readers, merge=merge)
            tensors = as_stored(plain, found, dtype)
        else:
            tensors = as_stored(base, shards_of(base, readers), dtype)
    return NamedWeights(base, tensors, readers)


def _refuse(model: Any, base: Any, dtype: torch.dtype | None, only: object) -> None:
    if only not in (None, "adapter"):
        raise ConfigError(f"only={only!r}; use 'adapter', or leave it out")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}; use one of floating-point numbers")
    if getattr(base, "_hf_peft_config_loaded", False):
        raise UnsupportedError(
            f"{class_name(base)} holds adapters itself (add_adapter), which are not merged here; use PEFT's "
            "get_peft_model"
        )
    if only == "adapter" and not is_peft(model):
        raise ConfigError(
            f"only='adapter': {class_name(base)} has none; give the model of PEFT's get_peft_model"
        )
    if only == "adapter" and len(model.active_adapters) != 1:
        raise ConfigError(
            f"only='adapter': {model.active_adapters} are active; set one of them by set_adapter"
        )


def _adapter(
    model: Any, base: Any, readers: Readers, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Return the active adapter's tensors under the names of its files."""
    named = saved_names(base)
    found = {
        alias: tensor
        for name, tensor in shards_of(base, readers).items()
        for alias in named[name]
    }
    names = names_of_adapter(model, model.active_adapters[0], found)
    return {
        name: found[own] if dtype is None else found[own].to(dtype)
        for name, own in names.items()
    }
