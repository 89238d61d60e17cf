"""Contract of local attention kernels: memory, scores, launches, heads of a size, mirrored tiles."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunch, KernelLaunches


class Memory(NamedTuple):
    """A kernel's requirements on the layout of q, k, v, dout and out, each (B, H, T, D).

    ``in_rows``: ``x.stride(3) == 1`` and ``x.stride(2) >= D``. Without it, kernels that ignore the last stride, and
    products of overlapping (expanded) rows, are wrong. ``alignment_bytes``: rows of a multiple of this size also begin
    at a multiple of it, for vector loads; the kernel itself pads other rows. ``may_repeat``: batch and heads may be
    expanded (stride 0).
    """

    in_rows: bool = True
    alignment_bytes: int = 1
    may_repeat: bool = True

    @staticmethod
    def of_all(memories: Iterable["Memory"]) -> "Memory":
        in_rows, alignments, may_repeat = zip(ANY, *memories, strict=True)
        return Memory(any(in_rows), max(alignments), all(may_repeat))

    def fits(self, x: Tensor) -> bool:
        if self.in_rows and not is_in_rows(x):
            return False
        if not self.may_repeat and any(
            x.stride(dim) == 0 < x.shape[dim] - 1 for dim in (0, 1)
        ):
            return False
        return self.alignment_bytes == 1 or self._is_aligned(x)

    def laid_out(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, as contiguous copies if they do not fit."""
        if all(map(self.fits, tensors)):
            return tensors
        return tuple(
            x if self.fits(x) else x.clone(memory_format=torch.contiguous_format)
            for x in tensors
        )

    def _is_aligned(self, x: Tensor) -> bool:
        if x.shape[-1] * x.itemsize % self.alignment_bytes:
            return True
        starts = (
            x.data_ptr(),
            *(x.stride(dim) * x.itemsize for dim in range(3) if x.shape[dim] > 1),
        )
        return all(start % self.alignment_bytes == 0 for start in starts)


ANY: Final = Memory(in_rows=False)
# Kernels on tensor cores load 16 bytes at once.
FOR_TENSOR_CORES: Final = Memory(alignment_bytes=16, may_repeat=False)


def is_in_rows(x: Tensor) -> bool:
    """Return whether the last two dimensions have contiguous rows that do not overlap."""
    rows, size = x.shape[-2:]
    *_, of_rows, of_numbers = x.stride()
    return of_numbers == 1 and (rows == 1 or of_rows >= size)


@dataclass(frozen=True)
class Scores:
    """Scores ``s = scale q . k``, then ``softcap tanh(s / softcap)`` (Gemma 2), then ``s - slope |p - p'|`` (ALiBi).

    p, p' are global positions (Press et al. 2022). ``slopes`` (H,) float32, one per query head; with them
    ``query_positions`` (rows,) and ``key_positions`` (keys,) int64 are set, for a tile.
    """

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None

    @property
    def beyond_plain(self) -> str | None:
        """Return why a kernel that masks, then only scales, cannot compute them; None if it can."""
        return (
            "it has no softcap and no ALiBi slopes"
            if self.softcap or self.slopes is not None
            else self.lifts_masked
        )

    @property
    def lifts_masked(self) -> str | None:
        """Return why a kernel that masks before scaling cannot serve: -inf would not stay lowest; else None."""
        return (
            None
            if self.scale > 0
            else f"it needs a scale above 0, this is {self.scale}"
        )

    def heads(self, heads: slice) -> "Scores":
        return self if self.slopes is None else replace(self, slopes=self.slopes[heads])


class BackwardInputs(NamedTuple):
    """The incoming gradient, and the forward pass's inputs and results.

    dout and out (B, H, rows, E), q (B, H, rows, D), k (B, G, keys, D), v (B, G, keys, E), lse (B, H, rows).
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """Attention of the rows and keys of a launch, returned or merged into an earlier result.

    q (B, H, rows, D), k (B, G, keys, D), v (B, G, keys, E), cut to the launch; G divides H. ``lse`` is the natural
    log-sum-exp in float32; a row without keys has out 0 and lse -inf. ``scores`` maps q . k to scores, with the
    launch's positions if ALiBi needs them. Backward takes the rows' GLOBAL out and lse and computes this launch's share
    of dq, dk, dv.

    ``memory``: required layout of q, k, v, dout and out (``laid_out``). Running sums of an in-place kernel lie in rows,
    with any strides of batch, heads and tokens; lse, slopes and positions may have any strides.
    """

    name: str
    memory: Memory

    def why_not(self, q: Tensor, v: Tensor, scores: Scores) -> str | None:
        """Return why this kernel cannot serve such tensors and scores; None if it can, for any tiles."""
        ...

    def launches(self, tiles: tuple[Tile, ...]) -> KernelLaunches: ...


class Returning(Kernel, Protocol):
    """A kernel that returns the partial of a launch, and its share of the gradients."""

    adds_in_place: Literal[False]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, launch: KernelLaunch, scores: Scores
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, given: BackwardInputs, launch: KernelLaunch, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class InPlace(Kernel, Protocol):
    """A kernel that adds to the running out and lse, and to the running dq, dk and dv, all float32."""

    adds_in_place: Literal[True]

    def forward_into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        launch: KernelLaunch,
        scores: Scores,
        out: Tensor,
        lse: Tensor,
    ) -> None: ...

    def backward_into(
        self,
        given: BackwardInputs,
        launch: KernelLaunch,
        scores: Scores,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None: ...


def too_large(q: Tensor, v: Tensor, largest: int) -> str | None:
    size = max(q.shape[-1], v.shape[-1])
    return (
        None
        if size <= largest
        else f"its heads have at most {largest} numbers, these have {size}"
    )


def one_size(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Pad all heads with zeros to the largest size, rounded up to a multiple; this does not change scores."""
    sizes = {x.shape[-1] for x in tensors}
    size = -(-max(sizes) // multiple) * multiple
    if sizes == {size}:
        return tensors
    return tuple(x if x.shape[-1] == size else _filled_up(x, size) for x in tensors)


def _filled_up(x: Tensor, size: int) -> Tensor:
    """Return a contiguous copy: torch's ``pad`` may take a head of size 1 for channels-last."""
    wider = x.new_empty((*x.shape[:-1], size))
    wider[..., : x.shape[-1]] = x
    wider[..., x.shape[-1] :] = 0
    return wider


@lru_cache(maxsize=4096)
def _triangle_of(tile: Tile) -> tuple[bool, bool]:
    """Return whether a tile is causal, and whether anticausal: each layer asks it of each launch."""
    return tile.is_causal, tile.is_anticausal


class Triangles:
    """A kernel for full and causal tiles; anticausal tiles are mirrored, and heads padded to one size."""

    adds_in_place: Literal[False] = False
    head_multiple = 1

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return out and log-sum-exp of heads of one size."""
        raise NotImplementedError

    def differentiate(
        self, given: BackwardInputs, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    # Mirroring copies the tensors, but lets these kernels, which have only one triangle, compute the other.
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, launch: KernelLaunch, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return out (B, H, rows, E) and lse (B, H, rows) of a launch; flip rows and keys if its tile is anticausal."""
        is_causal, is_anticausal = _triangle_of(launch.tile)
        if is_anticausal:
            out, lse = self.forward(
                q.flip(2), k.flip(2), v.flip(2), _mirrored(launch), scores
            )
            return out.flip(2), lse.flip(2)
        padded = one_size(q, k, v, multiple=self.head_multiple)
        out, lse = self.compute(*padded, is_causal=is_causal, scale=scores.scale)
        return out[..., : v.shape[-1]], lse

    def backward(
        self, given: BackwardInputs, launch: KernelLaunch, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the launch's share of dq, dk and dv; flip rows and keys if its tile is anticausal."""
        is_causal, is_anticausal = _triangle_of(launch.tile)
        if is_anticausal:
            flipped = BackwardInputs(*(x.flip(2) for x in given))
            dq, dk, dv = self.backward(flipped, _mirrored(launch), scores)
            return dq.flip(2), dk.flip(2), dv.flip(2)
        *heads, lse = given
        padded = BackwardInputs._make(
            [*one_size(*heads, multiple=self.head_multiple), lse]
        )
        dq, dk, dv = self.differentiate(padded, is_causal=is_causal, scale=scores.scale)
        return (
            dq[..., : given.q.shape[-1]],
            dk[..., : given.k.shape[-1]],
            dv[..., : given.v.shape[-1]],
        )


def _mirrored(launch: KernelLaunch) -> KernelLaunch:
    return KernelLaunch.of(launch.tile.mirrored(launch.num_rows, launch.num_keys))
