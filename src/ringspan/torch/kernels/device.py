"""What a device can run."""

import torch
from torch import Tensor

from ringspan.gpu import support


def runs_triton(x: Tensor) -> bool:
    """Whether our own kernels run where ``x`` is: a CUDA device with float32 sums and an installed Triton."""
    return x.device.type == "cuda" and x.dtype == torch.float32 and support.has_triton()


def half_precision_on_cuda(q: Tensor, capability: tuple[int, int]) -> str | None:
    """Why tensors like ``q`` are not of half precision on a CUDA device of this compute capability; None if they
    are.
    """
    if q.device.type != "cuda":
        return f"it needs CUDA tensors, these are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, these are {str(q.dtype).removeprefix('torch.')}"
    found = torch.cuda.get_device_capability(q.device)
    if found < capability:
        return f"it needs compute capability {capability[0]}.{capability[1]}, this device has {found[0]}.{found[1]}"
    return None
