"""Attention of one row in N: a step that holds what a whole one holds, and takes a fraction of its time."""

from dataclasses import replace

from torch import Tensor

from ringspan.core.tile import Tile
from ringspan.torch.kernels import KERNELS, Returning
from ringspan.torch.kernels.launch import Launch, Launches
from ringspan.torch.scores import Scores


class Thinned:
    """A kernel that computes every ``every``-th row of a launch, against all of its keys, and gives the rows after it
    the same results.

    What it returns has the shapes and dtypes of the whole results, so that a ring of it exchanges, adds up and keeps
    the same bytes; the numbers mean nothing. Rows see later keys of their launch too, in both directions, so that their
    log-sum-exp is of all scores that backward meets and nothing grows.
    """

    def __init__(self, kernel: Returning, every: int) -> None:
        self.name, self.why_not = kernel.name, kernel.why_not
        self._kernel, self._every = kernel, every

    def launches(self, tiles: tuple[Tile, ...]) -> Launches:
        return self._kernel.launches(tiles)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse = self._kernel.forward(self._few(q), k, v, self._of_few(launch), scores)
        return self._as_many(out, launch), self._as_many(lse, launch)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = (self._few(x) for x in (dout, q, out, lse))
        dq, dk, dv = self._kernel.backward(dout, q, k, v, out, lse, self._of_few(launch), scores)
        return self._as_many(dq, launch), dk, dv

    def _few(self, rows: Tensor) -> Tensor:
        return rows[:, :, :: self._every]

    def _as_many(self, rows: Tensor, launch: Launch) -> Tensor:
        return rows.repeat_interleave(self._every, 2)[:, :, : launch.num_rows]

    def _of_few(self, launch: Launch) -> Launch:
        rows = -(-launch.num_rows // self._every)
        return replace(launch, q1=launch.q0 + rows, tiles=(Tile.full(0, rows, 0, launch.num_keys),))


def thin_attention(every: int) -> None:
    """Let this process compute one row in ``every`` of attention on a CPU, from now on."""
    kernel = KERNELS["cpu"]
    assert isinstance(kernel, Returning)
    KERNELS["cpu"] = Thinned(kernel, every)
