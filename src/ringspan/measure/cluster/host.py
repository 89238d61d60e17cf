"""Time that the host takes for a layer: with few tokens a device waits for it, whatever its speed."""

import time
from typing import Any, Final

import torch

from ringspan.measure.cluster.trial import small_llama
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import local_device
from ringspan.torch.runtime.mesh import make_mesh
from ringspan.torch.shard_batch import shard_batch

_LAYERS: Final = (2, 8)
_TOKENS: Final = 32
_STEPS: Final = 12
"""Steps of each model; the quickest counts, since anything else on the machine only adds."""


def launch_seconds() -> float:
    """Return the host's seconds for one pass of a layer of a Llama, the mean of forward and backward.

    Two models are so small that computing takes next to no time; their steps differ by the time of their layers.
    Nothing waits for the device, so the process's time goes to its launches, also on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others would spin, and count
    try:
        few, many = (_step_seconds(layers) for layers in _LAYERS)
    finally:
        torch.set_num_threads(threads)
    passes = 2 * (_LAYERS[1] - _LAYERS[0])
    return max(0.0, many - few) / passes


def _step_seconds(layers: int) -> float:
    """Return the seconds of the quickest forward and backward pass of a model with so many layers, on one rank."""
    device = local_device()
    mesh = make_mesh(device.type, 1, 1, 1)
    model: Any = parallelize(
        small_llama(_TOKENS, layers), mesh, checkpoint="none", watchdog=False
    )
    ids = torch.randint(
        0, 256, (1, _TOKENS), generator=torch.Generator().manual_seed(0)
    )
    batch = shard_batch({"input_ids": ids.to(device), "labels": ids.to(device)}, mesh)
    seconds: list[float] = []
    for _ in range(_STEPS):
        # What the step before has launched is over, so that this one only queues.
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.process_time()
        model(**batch).loss.backward()
        seconds.append(time.process_time() - started)
        model.zero_grad()
    return min(seconds)
