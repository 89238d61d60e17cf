"""Attention of one row in N: a step that holds what a whole one holds, and takes a fraction of its time."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Generic, Literal, TypeVar

from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunch
from ringspan.torch.engine.kernels import KERNELS, registered
from ringspan.torch.engine.kernels.contract import (
    BackwardInputs,
    InPlace,
    Kernel,
    Returning,
    Scores,
)

_Kernel = TypeVar("_Kernel", bound=Kernel)


class _Thinned(Generic[_Kernel]):
    """A kernel that computes every ``every``-th row of a launch, against all of its keys, and gives the rows after it
    the same results.

    What it makes has the shapes and dtypes of the whole results, so that a ring of it exchanges, adds up and keeps
    the same bytes; the numbers mean nothing. Rows see later keys of their launch too, in both directions, so that their
    log-sum-exp is of all scores that backward meets and nothing grows.
    """

    def __init__(self, kernel: _Kernel, every: int) -> None:
        self.name, self.why_not, self.launches = (
            kernel.name,
            kernel.why_not,
            kernel.launches,
        )
        self._kernel, self._every = kernel, every
        self.memory = kernel.memory

    def _few(self, rows: Tensor) -> Tensor:
        return rows[:, :, :: self._every]

    def _few_of(self, given: BackwardInputs) -> BackwardInputs:
        dout, q, k, v, out, lse = given
        return BackwardInputs(
            self._few(dout), self._few(q), k, v, self._few(out), self._few(lse)
        )

    def _of_few(self, launch: KernelLaunch) -> KernelLaunch:
        rows = -(-launch.num_rows // self._every)
        return replace(
            launch, q1=launch.q0 + rows, tiles=(Tile.full(0, rows, 0, launch.num_keys),)
        )


class Thinned(_Thinned[Returning]):
    """One that returns its results."""

    adds_in_place: Literal[False] = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, launch: KernelLaunch, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._kernel.forward(
            self._few(q), k, v, self._of_few(launch), scores
        )
        return self._as_many(out, launch), self._as_many(lse, launch)

    def backward(
        self,
        given: BackwardInputs,
        launch: KernelLaunch,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._kernel.backward(
            self._few_of(given), self._of_few(launch), scores
        )
        return self._as_many(dq, launch), dk, dv

    def _as_many(self, rows: Tensor, launch: KernelLaunch) -> Tensor:
        return rows.repeat_interleave(self._every, 2)[:, :, : launch.num_rows]


class ThinnedInPlace(_Thinned[InPlace]):
    """One that adds to what is there."""

    adds_in_place: Literal[True] = True

    def forward_into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        launch: KernelLaunch,
        scores: Scores,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        few = self._few(out), self._few(lse)
        self._kernel.forward_into(
            self._few(q), k, v, self._of_few(launch), scores, *few
        )
        self._spread(out)
        self._spread(lse)

    def backward_into(
        self,
        given: BackwardInputs,
        launch: KernelLaunch,
        scores: Scores,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        self._kernel.backward_into(
            self._few_of(given), self._of_few(launch), scores, self._few(dq), dk, dv
        )
        self._spread(dq)

    def _spread(self, rows: Tensor) -> None:
        """Without a copy of them all: what the kernel adds to in place takes no memory of its own."""
        for row in range(0, rows.shape[2], self._every):
            rows[:, :, row + 1 : row + self._every] = rows[:, :, row : row + 1]


def thin_attention(every: int) -> AbstractContextManager[None]:
    """Compute one row in ``every`` of attention on a CPU while this is active."""
    both = KERNELS["cpu"], KERNELS["eager"]
    return registered(
        *(
            ThinnedInPlace(one, every)
            if one.adds_in_place is True
            else Thinned(one, every)
            for one in both
        )
    )
