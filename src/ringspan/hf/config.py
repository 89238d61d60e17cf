"""Configuration of a trainer's ring."""

from dataclasses import dataclass, fields
from typing import get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import ConfigError
from ringspan.core.messages.numbers import check_whole
from ringspan.core.names import BalanceName, ReplayName
from ringspan.core.step_config import StepConfig
from ringspan.torch.runtime.foreign_mesh import ring_mesh
from ringspan.torch.runtime.mesh import init_mesh


@dataclass(frozen=True, kw_only=True)
class RingConfig(StepConfig):
    """The sizes of the mesh, and the options of ``ringspan.parallelize``.

    Args:
        ring: ranks that share each sequence; all remaining ranks when None.
        replicate: rings that take different examples.
        tp: ranks that share each token's heads and feed-forward.
        mesh: an existing one, as for ``parallelize``, in place of the three sizes.
        balance: ``flops`` moves examples within each step, which keeps its loss, so that replicas have equal work; for
            Trainer and SFT.
        shared_prefix: compute the shared beginnings of a batch's rows once, such as the prompt of a group of answers,
            or of a chosen and a rejected one; losses, metrics and weights stay the same.
        min_shared_tokens: the shortest beginning that rows share.
        vllm_weights_folder: where weights are left for a vLLM server that NCCL does not reach: shared memory on its
            host, or a shared disk.
        vllm_adapter_only: hand only the adapter to the vLLM server, by that folder.
        replay_routes: let mixtures of experts train on the routes that tokens took when they were written: the routes
            that the vLLM server returns (``rollout``), or that the pass for the old log-probabilities chose (``old``).
            Experts' weights come from the live scores.
        async_save: write checkpoints of a trainer during its steps, from a copy in host memory. ``on_save`` is called
            when a checkpoint is complete, with the state of its step.
        watch_speed: name a rank that computes much slower than the others, or a slow link between ranks, in a line and
            in ``<output_dir>/speed.jsonl``, with figures in the logs.
        prove: before the first step, prove a small model like this one exact with these options (``ringspan.prove``);
            rank 0 logs the verdict and its seconds, and a difference raises.

    Raises:
        ConfigError: an unknown ``balance`` or ``replay_routes``; ``vllm_adapter_only`` without a folder;
            ``replay_routes`` with ``shared_prefix``; when a trainer is made, sizes that do not give the number of
            ranks.
    """

    ring: int | None = None
    replicate: int = 1
    tp: int = 1
    mesh: DeviceMesh | None = None
    balance: BalanceName = "none"
    shared_prefix: bool = False
    min_shared_tokens: int = 64
    vllm_weights_folder: str | None = None
    vllm_adapter_only: bool = False
    replay_routes: ReplayName | None = None
    async_save: bool = False
    watch_speed: bool = False
    prove: bool = False

    def __post_init__(self) -> None:
        if self.balance not in get_args(BalanceName):
            raise ConfigError(
                f"balance={self.balance!r}; use one of {', '.join(get_args(BalanceName))}"
            )
        if self.replay_routes not in (None, *get_args(ReplayName)):
            raise ConfigError(
                f"replay_routes={self.replay_routes!r}; use one of {', '.join(get_args(ReplayName))}, or None"
            )
        if self.replay_routes is not None and self.shared_prefix:
            raise ConfigError(
                f"replay_routes={self.replay_routes!r} does not go with shared_prefix=True: a shared token has one "
                "route, and its rows may have several; leave one of the two out"
            )
        check_whole("min_shared_tokens", self.min_shared_tokens)
        if self.vllm_adapter_only and self.vllm_weights_folder is None:
            raise ConfigError(
                "vllm_adapter_only=True needs a folder for the adapter; set vllm_weights_folder"
            )
        if isinstance(self.compute_dtype, torch.dtype):  # as ``parallelize`` takes it
            object.__setattr__(
                self, "compute_dtype", str(self.compute_dtype).removeprefix("torch.")
            )

    def make_mesh(self) -> DeviceMesh:
        if self.mesh is not None:
            return ring_mesh(self.mesh)
        return init_mesh(ring=self.ring, replicate=self.replicate, tp=self.tp)

    @property
    def replicas(self) -> int:
        """Rings that take different examples."""
        return (
            self.replicate
            if self.mesh is None
            else ring_mesh(self.mesh)["replicate"].size()
        )

    @property
    def min_shared(self) -> int | None:
        """Fewest tokens that rows share; None if they share none."""
        return self.min_shared_tokens if self.shared_prefix else None

    @property
    def step(self) -> StepConfig:
        return StepConfig(
            **{field.name: getattr(self, field.name) for field in fields(StepConfig)}
        )
