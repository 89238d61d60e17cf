"""A proof before the first step of a training, by its trainer."""

import logging
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import RingspanError
from ringspan.core.step_config import StepConfig
from ringspan.proof.run import Asked, Proof, asked_of, prove_on
from ringspan.torch.runtime.dtypes import dtype_named

_log: Final = logging.getLogger(__name__)


def prove_before(
    model: nn.Module, mesh: DeviceMesh, step: StepConfig, *, tree: bool = False
) -> Proof:
    """Prove a model with a step's options on a trainer's mesh; rank 0 logs the verdict and its seconds.

    Random numbers that the trainer draws afterwards stay the same.

    Raises:
        RingspanError: on every rank, if a number differs; with the place.
    """
    options = dict(vars(step))
    options.pop("sent_as", None)  # kept from an earlier look
    dtype, pairs = options.pop("compute_dtype"), ()
    if dtype is not None:
        pairs = ((dtype_named(dtype), torch.float32),)
    asked: Asked = asked_of(model, options=options, trained=pairs, tree=tree)
    devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
    with torch.random.fork_rng(devices):
        proof = prove_on(mesh, asked)
    if not proof.is_exact:
        raise RingspanError(
            f"{_difference(proof)}; run ringspan prove --json and open an issue, or leave prove=True out"
        )
    if dist.get_rank() == 0:
        worst = max((row.error or 0.0 for row in proof.rows), default=0.0)
        _log.warning(
            "prove=True: %s is exact with these options, worst relative error %.0e, in %.0f s; not tried: %s",
            proof.model,
            worst,
            proof.seconds,
            "; ".join(proof.not_tried),
        )
    return proof


def _difference(proof: Proof) -> str:
    wrong: Any = next(row for row in proof.rows if not row.is_exact)
    needed = ", ".join(
        f"{key}={value}" for key, value in (proof.smallest or {}).items()
    )
    return (
        f"prove=True: {proof.model} differs from one process: {wrong.batch}, first at {wrong.place or wrong.of}, with "
        f"{needed or 'the default options'}"
    )
