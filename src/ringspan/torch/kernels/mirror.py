"""An anticausal tile as a causal one with rows and keys reversed, for kernels that know only that."""

from torch import Tensor

from ringspan.core.schedule.kernel_launches import KernelLaunch
from ringspan.torch.kernels.contract import BackwardInputs, Returning
from ringspan.torch.kernels.score_mod import Scores


def forward(
    kernel: Returning, q: Tensor, k: Tensor, v: Tensor, launch: KernelLaunch, scores: Scores
) -> tuple[Tensor, Tensor]:
    # Copies of the tensors, in return for kernels that know one triangle only.
    out, lse = kernel.forward(q.flip(2), k.flip(2), v.flip(2), _mirrored(launch), scores)
    return out.flip(2), lse.flip(2)


def backward(
    kernel: Returning, given: BackwardInputs, launch: KernelLaunch, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    flipped = BackwardInputs(*(x.flip(2) for x in given))
    dq, dk, dv = kernel.backward(flipped, _mirrored(launch), scores)
    return dq.flip(2), dk.flip(2), dv.flip(2)


def _mirrored(launch: KernelLaunch) -> KernelLaunch:
    return KernelLaunch.of(launch.tile.mirrored(launch.num_rows, launch.num_keys))
