"""The kernels that serve each kind of attention on CPUs and CUDA devices."""

from dataclasses import replace
from typing import Final

import torch

from ringspan.measure.cluster.doctor import CASES, serving
from ringspan.torch.engine.kernels.device import DeviceRules, ruled_by, rules_of

_EVERY_CUDA: Final = DeviceRules(
    cuts_for_cores=False,
    capability=(8, 0),
    has_cudnn=True,
    has_package=lambda name: name == "triton",
)


def serves() -> str:
    """Table of docs/masks.md: CPUs that multiply bfloat16 quickly, and CUDA devices of compute capability 8.0 with
    cuDNN and Triton as in PyTorch's builds, without the flash-attn packages.
    """
    lines = ["| attention | CPU | CUDA |", "| --- | --- | --- |"]
    cpu = replace(rules_of(torch.device("cpu")), multiplies_16_bits=True)
    with ruled_by(cpu=cpu, cuda=_EVERY_CUDA):
        for title, case in CASES.items():
            cells = (
                _shares(serving(case, torch.device(kind))) for kind in ("cpu", "cuda")
            )
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shares(served: dict[str, float]) -> str:
    """Names with their shares, unless one kernel does it all."""
    if len(served) < 2:
        return next(iter(served), "refused")
    return ", ".join(f"{name} {share:.0%}" for name, share in served.items())
