"""Kernels of your own: what computes attention of one block on one device, registered under a name.

A kernel has the methods of ``Returning``, or of ``InPlace`` if it adds to running sums. ``register`` makes it known on
this rank; a package registers its own by the entry point group ``ringspan.kernels``, whose entries are a kernel or a
list of them::

    [project.entry-points."ringspan.kernels"]
    mine = "my_package.ring:KERNEL"

It computes where ``kernel="its name"`` asks for it; ``auto`` does not choose it.
"""

from ringspan.core.schedule.kernel_launches import KernelLaunch, KernelLaunches
from ringspan.torch.engine.kernels import known, register
from ringspan.torch.engine.kernels.contract import (
    BackwardInputs,
    InPlace,
    Memory,
    Returning,
    Scores,
)

__all__ = [
    "BackwardInputs",
    "InPlace",
    "KernelLaunch",
    "KernelLaunches",
    "Memory",
    "Returning",
    "Scores",
    "known",
    "register",
]
