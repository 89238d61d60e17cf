"""Check that all ranks of a mesh make the same call, by one small reduction: the first message of every call."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import PeerMismatch, RingspanError
from ringspan.core.messages.lines import few
from ringspan.torch.engine.transport.collectives import gather_over

# A digest travels as words whose squares can be added up over 32,768 ranks in 64 bits.
_WORD_BITS: Final = 16
_NUM_WORDS: Final = 3
_TOLD: Final = "ring_told"  # attribute of an exception that other ranks have been told of, or will not expect
_REMEDIES: Final = {
    "input_ids": "every rank of a ring needs the same batch: sampler=rs.sampler(dataset, mesh), or rs.loader(dataset, "
    "mesh); torch's DistributedSampler must be given num_replicas={replicate} and rank=mesh['replicate']"
    ".get_local_rank(), not the world's",
    "chosen tokens": "a logits processor, prefix_allowed_tokens_fn or assistant must do the same on every rank",
    "num_items_in_batch": "it counts the targets of the whole batch, on all ranks",
    "optimizer": "create it identically on every rank, and step it on every rank",
}


@dataclass
class Call:
    """One rank's part of a collective call.

    ``alike_in_ring`` are facts that must be equal in each ring; the other facts must be equal on all ranks. ``targets``
    are summed over all ranks, an ``error`` is raised on all, and ``hear_all`` returns what each rank ``said``.
    """

    name: str
    alike: Mapping[str, Any] = field(default_factory=dict)
    alike_in_ring: Mapping[str, Any] = field(default_factory=dict)
    targets: int = 0
    error: Exception | None = None
    said: Any = None


@contextmanager
def preparing(
    mesh: DeviceMesh, name: str, *, between_replicas: bool = True
) -> Iterator[None]:
    """Guard preparations and user code: an error is also raised on the other ranks, at their next call."""
    try:
        yield
    except (
        Exception
    ) as error:  # whatever it is, the other ranks must not wait for this one
        if not vars(error).get(_TOLD):
            check_call(mesh, Call(name, error=error), between_replicas=between_replicas)
        raise


@contextmanager
def meeting(
    mesh: DeviceMesh, name: str, *, between_replicas: bool = True
) -> Iterator[Call]:
    """Yield a call to fill in, then ``check_call`` it; an error in the block is raised on all ranks."""
    call = Call(name)
    try:
        yield call
    except (
        Exception
    ) as raised:  # whatever it is, the other ranks must not wait for this one
        call.error = raised
    call.targets = check_call(mesh, call, between_replicas=between_replicas)


@contextmanager
def exchanging() -> Iterator[None]:
    """Guard joint computation: an error is told to no rank, since the others wait for other messages."""
    try:
        yield
    except Exception as error:
        vars(error)[_TOLD] = True
        raise


@torch.compiler.disable()
def check_call(mesh: DeviceMesh, call: Call, *, between_replicas: bool = True) -> int:
    """Check that all ranks (or one replica's) make the same call; return the sum of their targets.

    Raises:
        PeerMismatch: they do not: on every rank, naming what differs and which rank has what.
        Exception: ``call.error`` of this rank, else another rank's error.
    """
    return _meet(mesh, call, between_replicas=between_replicas)[0]


@torch.compiler.disable()
def hear_all(
    mesh: DeviceMesh, call: Call, *, between_replicas: bool = True
) -> list[Any]:
    """Return each rank's ``said`` (one entry if all are equal), at the cost of ``check_call``."""
    return [
        one.call.said for one in _meet(mesh, call, between_replicas=between_replicas)[1]
    ] or [call.said]


def _meet(
    mesh: DeviceMesh, call: Call, *, between_replicas: bool
) -> tuple[int, list["_Told"]]:
    """Return the sum of targets and, if anything differs, all ranks' calls; raise what ``check_call`` does.

    An ordinary call costs one small sum per axis of the mesh: the number of ranks, how many are without error, the
    targets, and words of digests with their squares, which show whether all ranks have the same. Only on a difference
    are the calls themselves exchanged.
    """
    names, everywhere, in_ring = (
        _words(thing)
        for thing in (call.name, (call.alike, call.said), call.alike_in_ring)
    )
    # The first number counts the ranks that have come, so sizes of meshes need not be known.
    mine = [
        1,
        int(call.error is None),
        call.targets,
        *_with_squares(names + everywhere + in_ring),
    ]
    # Ranks of the axis tp have the same targets, which count once.
    if "tp" in (mesh.mesh_dim_names or ()):
        mine[2] = call.targets if mesh.get_local_rank("tp") == 0 else 0
    sums = mine
    for axis in ("tp", "ring"):
        sums = _sum(mesh, axis, sums)
    num_in_ring = sums[0]
    # Rings may differ in this digest, so other replicas only learn whether it is equal within each ring.
    is_ring_alike = _are_alike(num_in_ring, sums[-2 * _NUM_WORDS :])
    sums = [*sums[: -2 * _NUM_WORDS], num_in_ring if is_ring_alike else 0]
    ranks, fine, targets, *digests, alike_in_rings = (
        _sum(mesh, "replicate", sums) if between_replicas else sums
    )
    if fine == ranks == alike_in_rings and _are_alike(ranks, digests):
        return targets, []
    told = _tell(
        mesh,
        call,
        [
            axis
            for axis in mesh.mesh_dim_names or ()
            if between_replicas or axis != "replicate"
        ],
    )
    if (error := _wrong(told, call)) is not None:
        vars(error)[_TOLD] = between_replicas or mesh.get_group("replicate").size() == 1
        raise error
    return targets, told


def _sum(mesh: DeviceMesh, axis: str, numbers: list[int]) -> list[int]:
    if axis not in (mesh.mesh_dim_names or ()) or mesh.get_group(axis).size() == 1:
        return numbers
    total = torch.tensor(numbers, device=mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group(axis))
    return total.tolist()


def _words(thing: object) -> list[int]:
    digest = hashlib.blake2b(
        repr(thing).encode(), digest_size=_NUM_WORDS * _WORD_BITS // 8
    ).digest()
    return [int.from_bytes(digest[i : i + 2], "big") for i in range(0, len(digest), 2)]


def _with_squares(words: list[int]) -> list[int]:
    return [number for word in words for number in (word, word * word)]


def _are_alike(ranks: int, sums: list[int]) -> bool:
    """Return whether all words are equal: only then ``n sum(w^2) = sum(w)^2`` (Cauchy and Schwarz)."""
    return all(
        ranks * squares == total * total
        for total, squares in zip(sums[::2], sums[1::2], strict=True)
    )


class _Told(NamedTuple):
    rank: int
    replica: int
    call: Call


def _tell(mesh: DeviceMesh, call: Call, axes: list[str]) -> list[_Told]:
    replica = mesh.get_local_rank("replicate")
    # Whole values are sent only now that something is wrong; an ordinary call costs a few numbers.
    told = Call(
        call.name, call.alike, call.alike_in_ring, 0, _portable(call.error), call.said
    )
    return sorted(
        gather_over(mesh, _Told(dist.get_rank(), replica, told), axes),
        key=lambda one: one.rank,
    )


def _wrong(told: list[_Told], call: Call) -> Exception | None:
    """Return the error that all ranks raise, or None: a rank's own error, else different calls, else different facts.

    In that order, since a rank that failed makes no other call, and facts of different calls cannot be compared.
    """
    if failed := [one.call.error for one in told if one.call.error is not None]:
        return call.error or failed[0]
    if len({one.call.name for one in told}) > 1:
        doing = _by_rank((one.rank, one.call.name) for one in told)
        return PeerMismatch(
            f"the ranks do different things: {doing}; make each call on every rank"
        )
    rings = [
        [one for one in told if one.replica == replica]
        for replica in sorted({one.replica for one in told})
    ]
    in_rings = (
        _differences(ring, of_ring=True, replicate=len(rings)) for ring in rings
    )
    return next(chain(_differences(told), *in_rings), None)


def _differences(
    told: list[_Told], *, of_ring: bool = False, replicate: int = 1
) -> Iterator[PeerMismatch]:
    """Yield an error for each fact that differs between ranks, with the ranks of each value and the known remedies."""
    facts = [one.call.alike_in_ring if of_ring else one.call.alike for one in told]
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name) for each in facts]
        if any(value != values[0] for value in values):
            shown = _by_rank(zip((one.rank for one in told), values, strict=True))
            whose = "the ranks of one ring" if of_ring else "the ranks"
            remedies = (text for key, text in _REMEDIES.items() if key in name)
            remedy = "".join(
                f"; {text.format(replicate=replicate)}" for text in remedies
            )
            yield PeerMismatch(f"{whose} were given different {name}: {shown}{remedy}")


def _by_rank(values: Iterator[tuple[int, Any]]) -> str:
    """List each value with its ranks, most frequent first: thousands of ranks in one line."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{_ranks(those)}: {value}" for value, those in ranks.items())


def _ranks(those: list[int]) -> str:
    return f"rank{'s' if len(those) > 1 else ''} {few(those)}"


def _portable(error: Exception | None) -> Exception | None:
    """Return the error as another rank raises it: ours unchanged, others by name."""
    if error is None:
        return None
    if isinstance(error, RingspanError):
        # A new exception, since the original may hold objects that cannot be pickled.
        return type(error)(str(error))
    return PeerMismatch(
        f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
    )
