"""Our own kernel for what the others do not serve: any tiles of a hop in one launch, added up in place."""

from typing import Literal

from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunch, KernelLaunches, whole
from ringspan.gpu import support
from ringspan.torch.engine.kernels.contract import (
    BackwardInputs,
    Memory,
    Scores,
    too_large,
)
from ringspan.torch.engine.kernels.device import rules_of


class TritonAttention:
    """``triton_attention``, imported when it first runs; on a CPU only in Triton's interpreter, for tests."""

    name = "triton"
    memory = Memory()
    adds_in_place: Literal[True] = True

    def why_not(self, q: Tensor, v: Tensor, scores: Scores) -> str | None:
        """Return why the device, Triton, the dtype or the size of heads rules this kernel out; None if it can run."""
        is_interpreted = q.device.type == "cpu" and support.interprets_triton()
        if q.device.type != "cuda" and not is_interpreted:
            return f"it needs CUDA tensors, these are on {q.device.type}"
        if not rules_of(q.device).has_package("triton"):
            return "triton is not installed (pip install triton)"
        dtype = str(q.dtype).removeprefix("torch.")
        if dtype not in support.LARGEST_HEADS:
            return f"it computes in bfloat16, float16 or float32, these are {dtype}"
        if reason := too_large(q, v, support.LARGEST_HEADS[dtype]):
            return reason
        if q.device.type == "cuda" and rules_of(q.device).capability < (8, 0):
            return "it needs compute capability 8.0"
        return None

    def launches(self, tiles: tuple[Tile, ...]) -> KernelLaunches:
        return whole(tiles)

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
        from ringspan.torch.engine.kernels.local import triton_attention

        triton_attention.forward_into(q, k, v, launch, scores, out, lse)

    def backward_into(
        self,
        given: BackwardInputs,
        launch: KernelLaunch,
        scores: Scores,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        from ringspan.torch.engine.kernels.local import triton_attention

        triton_attention.backward_into(given, launch, scores, dq, dk, dv)
