"""One way to run a training step, as it is planned, traced or counted."""

from dataclasses import dataclass, replace
from functools import cached_property

from ringspan.core.arguments import FREE_CHUNK_TOKENS, FREE_NORM_TOKENS
from ringspan.core.costs import DTYPE_BYTES
from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.expert_slices import num_slices
from ringspan.core.geometry.layout import Layout
from ringspan.core.mechanisms import FOLDS, refuse_pairs
from ringspan.core.names import (
    ChunkTokens,
    LayoutName,
    checkpoint_name,
    offload_name,
)
from ringspan.core.schedule.choice import check_segments, sends_latents
from ringspan.core.schedule.route import Route, member_heads
from ringspan.core.step_config import StepConfig, check_beside_folds
from ringspan.plan.model.kinds import LayerKind
from ringspan.plan.model.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class Setting(StepConfig):
    """One training step: its length and split, the options of ``parallelize``, and dtypes.

    ``batch``: sequences of a rank's micro-step; ``parameter_dtype``: of parameters, gradients and moments,
    if ``optimizer_state`` packs none (``MOMENT_BYTES``); ``optimizer_on_host``: AdamW's moments are in host memory.
    ``on_gpu``: fewer groups of heads than on a CPU, and the optimizer takes all parameters at once.
    """

    layout: LayoutName = "zigzag"  # pyright: ignore[reportIncompatibleVariableOverride]  # of one long sequence
    length: int
    ring: int = 1
    replicate: int = 1
    tp: int = 1
    batch: int = 1
    compute_dtype: str = "bfloat16"  # pyright: ignore[reportIncompatibleVariableOverride]
    parameter_dtype: str = "float32"
    optimizer_on_host: bool = False
    optimizer_state: str = "float32"
    on_gpu: bool = True

    @property
    def devices(self) -> int:
        return self.replicate * self.ring * self.tp

    @cached_property
    def way(self) -> Route:
        return Route.parse(self.route, self.ring)

    def latent_dim(self, kind: LayerKind) -> int:
        """Return the numbers of a token that travel in place of a layer's keys and values, 0 if these do."""
        return (
            kind.compressed
            if sends_latents(self, self.way, self.ring, has_tp=self.tp > 1)
            else 0
        )

    def route_of(self, kind: LayerKind) -> str:
        """Return a layer's route: latents take the ring where keys would be gathered."""
        return (
            "ring"
            if self.way.name == "all-gather" and self.latent_dim(kind)
            else self.route
        )

    @cached_property
    def fold(self) -> "Setting":
        """The setting of one fold, with its length and ``folds`` 0; this setting, if it has one fold."""
        return (
            self
            if self.folds < 2
            else replace(self, length=-(-self.length // self.folds), folds=0)
        )

    @cached_property
    def tokens(self) -> int:
        """Tokens of a rank, with padding."""
        return (
            max(1, self.folds)
            * self.batch
            * Layout(self.layout, self.fold.length, self.ring).tokens_per_rank
        )

    @property
    def number_bytes(self) -> int:
        return dtype_bytes(self.compute_dtype)

    @property
    def feedforward_tokens(self) -> int:
        """Tokens that a feed-forward computes at once, 0 for all; ``auto``: chunks if there are checkpoints."""
        return self._chunk_tokens(self.feedforward_chunk_tokens)

    @cached_property
    def norm_tokens(self) -> int:
        """Tokens that a norm takes at once, 0 for all."""
        if self.norm_chunk_tokens == "auto" and self.fold.tokens < FREE_NORM_TOKENS:
            return 0
        return self._chunk_tokens(self.norm_chunk_tokens)

    def slices_of(self, kind: LayerKind) -> int:
        """Return the number of slices of a layer's experts; 1 for a layer without experts."""
        experts, numbers = kind.experts
        if not experts or self.expert_slices == 1:
            return 1
        return num_slices(self.expert_slices, experts, numbers * self.number_bytes)

    def tokens_at_once(self, kind: LayerKind) -> int:
        """Return the tokens that a layer's feed-forward computes at once, 0 for all; a slice has its share of rows."""
        slices, chunk = self.slices_of(kind), self.feedforward_tokens
        if slices == 1:
            return chunk
        share = -(-self.tokens // slices)
        return min(chunk, share) if chunk else share

    def slice_of(self, kind: LayerKind) -> int:
        """Return the weights of the largest slice of a layer's experts; 0 if they are gathered with their layer."""
        slices, (experts, numbers) = self.slices_of(kind), kind.experts
        return numbers * -(-experts // slices) // experts if slices > 1 else 0

    def _chunk_tokens(self, chosen: ChunkTokens) -> int:
        if chosen == "auto":
            return 0 if self.checkpoint == "none" else FREE_CHUNK_TOKENS
        return chosen

    @property
    def parameter_bytes(self) -> int:
        return dtype_bytes(self.parameter_dtype)

    def micro_steps(self, sequences: int) -> int:
        """Return each replica's forward and backward passes for an optimizer step of ``sequences`` sequences."""
        return sequences // (self.replicate * self.batch)

    @property
    def uses_host(self) -> bool:
        return self.offload != "none" or self.optimizer_on_host

    @property
    def has_moments_on_host(self) -> bool:
        """True if AdamW's moments are in other memory than the device's."""
        return self.optimizer_on_host and self.on_gpu


def dtype_bytes(name: str) -> int:
    if name not in DTYPE_BYTES:
        raise ConfigError(
            f"unknown dtype {name!r}; choose one of {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[name]


def check_setting(shape: ModelShape, setting: Setting) -> None:
    """Refuse options as ``parallelize`` does (ConfigError), and routes or tp that ranks and heads rule out."""
    check_beside_folds(setting)
    if setting.folds > 1:
        folds = {FOLDS: f"folds={setting.folds}"}
        refuse_pairs(shape.mechanisms | folds, shape.name)
    if shape.takes_keys_from_all and not setting.sent_as.is_exact:
        raise UnsupportedError(
            f"{setting.sent_as.option}: {shape.name} chooses its keys by an index, and other keys would win; use exact"
        )
    checkpoint_name(setting.checkpoint)
    check_segments(setting.checkpoint, setting.layers_per_checkpoint)
    offload_name(setting.offload)
    if setting.offload != "none" and setting.checkpoint == "none":
        raise ConfigError(
            "offload moves what checkpointing keeps; use checkpoint='attention' or 'full'"
        )
    setting.way.check_sent_as(setting.sent_as)
    local = shape.split(setting.tp)
    for kind in local.counted(local.layers):
        if kind.attends:
            member_heads(kind.heads, kind.kv_heads, setting.way.ulysses)
