"""Inputs and outputs of a local attention kernel."""

from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunch, KernelLaunches
from ringspan.torch.kernels.memory import Memory
from ringspan.torch.kernels.score_mod import Scores


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
    """Attention of the rows and keys of launches: the result of one, or added to an earlier result.

    q (B, H, rows, D), k (B, G, keys, D), v (B, G, keys, E), cut to the launch; G divides H. ``lse`` is the natural
    log-sum-exp in float32; a row without keys has out 0 and lse -inf. ``scores`` maps q . k to scores, with the
    launch's positions if they count. Backward takes the rows' GLOBAL out and lse and computes this launch's share of
    dq, dk, dv.

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
        self, q: Tensor, k: Tensor, v: Tensor, launch: KernelLaunch, scores: Scores, out: Tensor, lse: Tensor
    ) -> None: ...

    def backward_into(
        self, given: BackwardInputs, launch: KernelLaunch, scores: Scores, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> None: ...
