"""Options of a training step on a mesh."""

from dataclasses import dataclass
from functools import cached_property

from ringspan.core.codec import Codec, Sent
from ringspan.core.errors import ConfigError
from ringspan.core.geometry.folds import check_folds
from ringspan.core.names import (
    BatchLayoutName,
    CheckpointName,
    ChunkTokens,
    CommDtypeName,
    ExpertSlices,
    IndexLossName,
    KernelName,
    OffloadName,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Options of ``ringspan.parallelize``, which documents them, and their defaults."""

    layout: BatchLayoutName = "zigzag"
    route: str = "ring"
    comm_dtype: CommDtypeName = "exact"
    kernel: KernelName = "auto"
    checkpoint: CheckpointName = "attention"
    layers_per_checkpoint: int = 1
    folds: int = 1
    loss_chunk_tokens: int = 1024
    loss_chunk_vocabulary: int | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    index_loss: IndexLossName = "none"
    feedforward_chunk_tokens: ChunkTokens = "auto"
    norm_chunk_tokens: ChunkTokens = "auto"
    expert_slices: ExpertSlices = 1
    offload: OffloadName = "none"
    compute_dtype: str | None = None
    compile: bool | str = False
    watchdog: bool = False

    @cached_property
    def sent_as(self) -> Codec:
        """The encoding of keys and values in messages; UnsupportedError for an unknown ``comm_dtype``."""
        return self.sent.codec

    @cached_property
    def sent(self) -> Sent:
        """Encodings of attention's tensors in messages."""
        return Sent(self.comm_dtype)


def check_beside_folds(config: StepConfig) -> None:
    """Raise LayoutError or ConfigError for a layout or a route that sequences in folds do not take."""
    if config.folds == 1:
        return
    check_folds(config.layout, config.folds)
    if "ulysses" in config.route or config.route == "auto":
        raise ConfigError(
            f"folds={config.folds} does not go with route {config.route!r}; use ring or all-gather"
        )


def check_beside_compile(config: StepConfig) -> None:
    """Raise ConfigError for options that compiled layers would hide."""
    if config.compile is False:
        return
    for name, why, values in (
        ("offload", "takes what layers keep out of their programs", ("none",)),
        ("folds", "reads keys and values outside of programs", (1,)),
        (
            "layers_per_checkpoint",
            "computes layers again outside of their programs",
            (1,),
        ),
        ("feedforward_chunk_tokens", "runs blocks outside of programs", ("auto", 0)),
        ("norm_chunk_tokens", "runs blocks outside of programs", ("auto", 0)),
    ):
        if (value := getattr(config, name)) not in values:
            raise ConfigError(
                f"{name}={value!r} {why}; use {name}={values[0]!r} or compile=False"
            )
