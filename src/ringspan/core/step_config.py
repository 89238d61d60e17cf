"""How a training step runs on a mesh: the options of ``parallelize``, once."""

from dataclasses import dataclass

from ringspan.core.names import BatchLayoutName, CheckpointName, ChunkTokens, CommDtypeName, KernelName, OffloadName


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The options of ``ringspan.parallelize``, which documents them, and their defaults.

    The trainer makes one of its tables, the planner's ``Setting`` is one, and ``put_on_mesh`` takes either. A
    ``compute_dtype`` is named here as torch names it, so that a plan needs no torch.
    """

    layout: BatchLayoutName = "zigzag"
    route: str = "ring"
    comm_dtype: CommDtypeName = "exact"
    kernel: KernelName = "auto"
    checkpoint: CheckpointName = "attention"
    layers_per_checkpoint: int = 1
    loss_chunk_tokens: int = 1024
    loss_chunk_vocabulary: int | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    feedforward_chunk_tokens: ChunkTokens = "auto"
    norm_chunk_tokens: ChunkTokens = "auto"
    offload: OffloadName = "none"
    compute_dtype: str | None = None
    watchdog: bool = True
