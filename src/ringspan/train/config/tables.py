"""A run's configuration: a TOML file and `key=value` overrides -> frozen, checked models.

Relative paths (data.paths, and local model.path, model.tokenizer, model.config) are taken from the current directory,
not from the file's folder.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ringspan.core.codec import codec
from ringspan.core.errors import ConfigError, LayoutError, UnsupportedError
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.messages.extras import installed, require
from ringspan.core.names import (
    BatchLayoutName,
    CheckpointName,
    CommDtypeName,
    IndexLossName,
    KernelName,
    OffloadName,
)
from ringspan.core.schedule.route import Route
from ringspan.core.step_config import (
    StepConfig,
    check_beside_compile,
    check_beside_folds,
)
from ringspan.train.config.data_table import DataConfig
from ringspan.train.config.model_table import AdapterConfig, ModelConfig
from ringspan.train.config.problems import Table, shown


class MeshConfig(Table):
    """[mesh]: arrangement of the processes; their number is ring times replicate times tp."""

    ring: int | None = Field(default=None, ge=1, examples=[8])
    """Parts that a sequence is split into; default: all processes divided by replicate and tp."""
    replicate: int = Field(default=1, ge=1)
    """Number of rings, each with its own sequences."""
    tp: int = Field(default=1, ge=1)
    """Processes that share tokens and split heads, feed-forward and vocabulary (tensor parallelism)."""


class AttentionConfig(Table):
    """[attention]: attention on the ring."""

    layout: BatchLayoutName = "zigzag"
    """Which positions each process holds. "zigzag" and "striped" balance causal work; "contiguous" does not; "balanced"
    is made for the documents of each batch, for data.documents = "separate", see docs/layouts.md."""
    route: str = "ring"
    """Communication pattern of attention: "ring", "bidirectional", "double-ring:8" (nodes of eight), "all-gather",
    "pass-q" (queries travel instead), "ulysses", "ulysses:4" (groups of four, a ring between them) or "auto"."""
    comm_dtype: CommDtypeName = "exact"
    """Dtype of keys and values in messages; all except "exact" add an error, see docs/routes.md."""
    kernel: KernelName = "auto"
    """Kernel of attention, see docs/kernels.md; "auto": the fastest that supports the inputs."""


class MemoryConfig(Table):
    """[memory]: memory of the backward pass."""

    checkpoint: Literal[CheckpointName, "auto"] = "attention"
    """Activation checkpointing: "none" keeps all, "full" recomputes each layer, "attention" all of it but its
    attention, "auto" as little as activation_bytes allows."""
    activation_bytes: int | None = Field(default=None, ge=1, examples=[20_000_000_000])
    """Bytes of activations that a rank may keep, for checkpoint = "auto", which is the default if this is set."""
    layers_per_checkpoint: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Consecutive layers that keep only the first one's input; the others are recomputed, which costs one more
    forward pass. The square root of the number of layers keeps least, see docs/memory.md. "auto": 1, or with checkpoint
    = "auto" as few as activation_bytes allows."""
    folds: int = Field(default=1, ge=1)
    """Parts of each sequence that a rank computes one after the other: activations of one exist at once, keys and
    values of all; "offload" moves these too. See docs/memory.md."""
    loss_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at once."""
    loss_chunk_vocabulary: int | None = Field(default=None, ge=1, examples=[16384])
    """Vocabulary entries whose logits exist at once; default: all. With fewer, logits are computed twice."""
    feedforward_chunk_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Tokens that a feed-forward works on at once; 0: all. "auto": 4096 where that is almost free, see
    docs/memory.md."""
    norm_chunk_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """The same for norms, which otherwise keep float32 copies; "auto": 4096 if layers are checkpointed and a rank has
    16384 tokens or more."""
    expert_slices: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Parts that a layer's experts are gathered in, one after the other; "auto": the fewest of 2 GiB at most. See
    docs/memory.md."""
    offload: OffloadName = "none"
    """"activations" moves checkpointed tensors to host memory, or on a CPU to memory-mapped files."""

    @model_validator(mode="before")
    @classmethod
    def _auto_where_a_budget_is_set(cls, values: object) -> object:
        if (
            isinstance(values, dict)
            and "checkpoint" not in values
            and values.get("activation_bytes") is not None
        ):
            return values | {"checkpoint": "auto"}
        return values

    @model_validator(mode="after")
    def _check_budget(self) -> "MemoryConfig":
        if (self.checkpoint == "auto") != (self.activation_bytes is not None):
            raise ConfigError(
                f'memory.checkpoint = "{self.checkpoint}": "auto" and memory.activation_bytes go together; '
                "set both or neither"
            )
        if self.checkpoint == "none" and self.layers_per_checkpoint not in ("auto", 1):
            raise ConfigError(
                f"memory.layers_per_checkpoint = {self.layers_per_checkpoint}: layers share the input that "
                'checkpointing keeps; set memory.checkpoint = "attention"'
            )
        if self.checkpoint == "none" and self.offload != "none":
            raise ConfigError(
                f'memory.offload = "{self.offload}": moves what checkpointing keeps; set memory.checkpoint = '
                '"attention"'
            )
        return self


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Table):
    """[optimizer]: AdamW with linear warm-up and cosine decay, and the size of a batch."""

    learning_rate: float = Field(default=3e-4, gt=0)
    """Highest learning rate, reached after the warm-up."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay."""
    betas: tuple[_Beta, _Beta] = Field(default=(0.9, 0.95), strict=False)
    """Decay of the first and the second moment, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps over which the learning rate rises from 0; the default is at most the steps that the run began with."""
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step, as a share of the highest."""
    clip_grad_norm: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient; 0: no limit."""
    batch_size: int = Field(default=1, ge=1)
    """Sequences per replica and micro-step."""
    accumulation_steps: int = Field(default=1, ge=1)
    """Micro-steps per optimizer step."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-sum-exp of the logits in the loss, which keeps logits near 0."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of each target's probability spread over the vocabulary."""
    index_loss: IndexLossName = "none"
    """What trains the index of a model that chooses its keys: "sparse", attention to the keys it chose; "dense",
    attention to all keys, which its choice then does not limit; "none" does not train it, see docs/chosen-keys.md."""
    name: Literal[
        "adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "lion_8bit"
    ] = "adamw"
    """AdamW, or an optimizer of bitsandbytes with moments in 8 bits, or in pages that go to the host if need be."""
    state: Literal["float32", "8bit", "4bit"] = "float32"
    """Moments of AdamW; "8bit" and "4bit" need torchao."""
    on_host: bool = False
    """Keep AdamW's moments in host memory, and update there."""
    rounding: Literal["nearest", "stochastic", "master"] = "nearest"
    """Rounding of updates to bfloat16 parameters: "nearest" loses small ones; "stochastic" rounds up or down in
    proportion; "master" updates a float32 copy on the host. The last two keep float32 moments."""

    def require_extras(self) -> None:
        if self.name != "adamw":
            require(f'optimizer.name = "{self.name}"', "bitsandbytes")
        if self.state != "float32" and not installed("torchao"):
            raise ConfigError(
                f'optimizer.state = "{self.state}": needs torchao, which is not installed; pip install torchao, or set '
                'optimizer.state = "float32"'
            )

    def with_warmup(self, steps: int) -> "OptimizerConfig":
        """Return a copy with another warm-up, which still counts as unset if it was."""
        return OptimizerConfig.model_construct(
            self.model_fields_set, **dict(self) | {"warmup_steps": steps}
        )

    @model_validator(mode="after")
    def _check_state(self) -> "OptimizerConfig":
        """Raise ConfigError for options of moments that the optimizer lacks or that exclude each other."""
        if self.name != "adamw":
            defaults = {"state": "float32", "on_host": False, "rounding": "nearest"}
            defaults |= {"eps": 1e-8} if self.name == "lion_8bit" else {}
            for option, value in defaults.items():
                if (given := getattr(self, option)) != value:
                    raise ConfigError(
                        f"optimizer.{option} = {given!r}: has no effect on {self.name}; leave it out, or set "
                        'optimizer.name = "adamw"'
                    )
        if self.rounding == "master" and not self.on_host:
            raise ConfigError(
                'optimizer.rounding = "master": float32 copies on the device take as much as float32 parameters; set '
                'optimizer.on_host = true, or model.parameter_dtype = "float32"'
            )
        if self.rounding == "stochastic" and self.on_host:
            raise ConfigError(
                'optimizer.rounding = "stochastic": is done on the device; set optimizer.on_host = false, or '
                'optimizer.rounding = "master"'
            )
        if self.on_host and self.state != "float32":
            raise ConfigError(
                f'optimizer.state = "{self.state}": cannot be on the host; set optimizer.on_host = false, or '
                'optimizer.state = "float32"'
            )
        return self


class EvaluationConfig(Table):
    """[evaluation]: the loss on the text that data.eval_fraction holds out."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only after the last step."""
    num_sequences: int = Field(default=8, ge=1)
    """Sequences per evaluation, at most."""


class CheckpointsConfig(Table):
    """[checkpoints]: checkpoints; a stopped run resumes from the newest."""

    every_steps: int = Field(default=100, ge=0)
    """Steps between checkpoints, and one after the last step; 0: only when a signal stops the run, or when the finished
    model cannot be written."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    async_save: bool = True
    """Write during training, from a copy of this rank's shards in CPU memory; false: training waits."""

    @model_validator(mode="before")
    @classmethod
    def _take_the_earlier_name(cls, values: object) -> object:
        """Read ``asynchronous``, the name of ``async_save`` in files of earlier releases and their runs."""
        if not isinstance(values, dict) or "asynchronous" not in values:
            return values
        if "async_save" in values:
            raise ConfigError(
                "checkpoints.asynchronous is the earlier name of checkpoints.async_save, which is set too; leave it out"
            )
        others = {name: x for name, x in values.items() if name != "asynchronous"}
        return others | {"async_save": values["asynchronous"]}


class GuardConfig(Table):
    """[guard]: handling of steps whose loss or gradient is extraordinary."""

    non_finite: Literal["skip", "stop"] = "skip"
    """If a NaN or Inf occurs: "skip" the step on all ranks, or "stop" the run. Such a step is never applied."""
    max_skipped_steps: int = Field(default=3, ge=0)
    """Steps in a row that may be skipped before the run stops."""
    spike: Literal["off", "report", "skip", "rewind"] = "report"
    """A loss or gradient norm far above the last ones: "report" it, "skip" the step, or "rewind" to the newest
    checkpoint and continue with the data after the spike."""
    spike_zscore: float = Field(default=8.0, gt=0)
    """Standard deviations above the mean, of logarithms, from which a step is a spike."""
    spike_window_steps: int = Field(default=100, ge=20)
    """Steps for the standard deviation; the mean is over the last 20."""
    max_rewinds: int = Field(default=3, ge=0)
    """Rewinds of a run; after that, spikes are only reported."""


class WatchdogConfig(Table):
    """[watchdog]: when ranks stop waiting for a lost one."""

    enabled: bool = True
    """Watch the other ranks over a connection to rank 0."""
    timeout_steps: float = Field(default=10.0, gt=1)
    """Time without progress after which a rank counts as stalled, in median steps."""
    min_seconds: float = Field(default=30.0, gt=0)
    """Minimum of that time."""
    patience_seconds: float = Field(default=1800.0, gt=0)
    """The same for the first three steps, evaluation and saving."""
    silence_seconds: float = Field(default=60.0, gt=0)
    """Time after which a silent rank (stopped or cut off) counts as stalled, whatever it was doing."""


def step_options(*tables: Table) -> dict[str, Any]:
    """Return the options of ``StepConfig`` that tables have, which have the same names there."""
    return {
        field.name: getattr(table, field.name)
        for table in tables
        for field in fields(StepConfig)
        if field.name in type(table).model_fields
    }


class TrainConfig(Table):
    """A training run, made by `load_config` or `parse_config`; built directly, it raises pydantic's ValidationError."""

    run: str = Field(default="runs/finetune", min_length=1)
    """Folder for metrics and checkpoints."""
    seed: int = Field(default=0, ge=0)
    """Seed of new weights and of the order of the data."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the whole run."""
    profile: bool = False
    """Draw memory and hops of the first three steps, in the folder profile of the run; slows the first two."""
    watch_speed: bool = False
    """Name a rank that computes much slower than the others, or a slow link between ranks, while the run continues."""
    model: ModelConfig
    """The model, its weights and its tokenizer."""
    data: DataConfig
    """Which text, and how it becomes sequences."""
    adapter: AdapterConfig = AdapterConfig()
    """Small matrices that are trained in the place of the model's weights."""
    mesh: MeshConfig = MeshConfig()
    """How the processes are arranged."""
    attention: AttentionConfig = AttentionConfig()
    """Attention on the ring."""
    memory: MemoryConfig = MemoryConfig()
    """Memory of the backward pass."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW, its schedule, and the size of a batch."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """The loss on held-out text."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    """What a run goes on from."""
    guard: GuardConfig = GuardConfig()
    """What happens to a step that is out of the ordinary."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """When ranks stop waiting for a lost one."""

    @model_validator(mode="after")
    def _check_across_tables(self) -> "TrainConfig":
        """Raise ConfigError for keys of different tables that exclude each other; settle an unset warm-up."""
        self._fit_warmup()
        if self.data.balance == "flops" and self.data.documents != "separate":
            raise ConfigError(
                f'data.balance = "flops": sequences of data.documents = "{self.data.documents}" all take the same '
                'attention; set documents = "separate", or leave balance out'
            )
        if self.data.shared_prefix and self.optimizer.batch_size == 1:
            raise ConfigError(
                "data.shared_prefix = true: the sequences of a micro-step share, and optimizer.batch_size = 1 has no "
                "second one; raise it, or leave shared_prefix out"
            )
        if (
            self.optimizer.rounding != "nearest"
            and self.model.parameter_dtype != "bfloat16"
        ):
            raise ConfigError(
                f'optimizer.rounding = "{self.optimizer.rounding}": is for model.parameter_dtype = "bfloat16", and it '
                f'is "{self.model.parameter_dtype}"; set one of them'
            )
        self._check_step()
        if self.profile and self.steps < 3:
            raise ConfigError(
                f"profile = true: takes three steps, and steps = {self.steps}; raise it"
            )
        if self.adapter.rank is not None:
            self._check_adapter()
        if self.evaluation.every_steps and not self.data.eval_fraction:
            raise ConfigError(
                f"evaluation.every_steps = {self.evaluation.every_steps}: data.eval_fraction = 0 holds out no text to "
                "evaluate on; raise it, or set evaluation.every_steps = 0"
            )
        return self

    def _fit_warmup(self) -> None:
        """Shorten an unset warm-up to the steps; raise ConfigError for one that is set to more."""
        if self.optimizer.warmup_steps <= self.steps:
            return
        if "warmup_steps" in self.optimizer.model_fields_set:
            raise ConfigError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps}: is more than steps = {self.steps}; "
                f"set it to at most {self.steps}"
            )
        # pydantic has frozen the model, so the attribute is set around it.
        object.__setattr__(self, "optimizer", self.optimizer.with_warmup(self.steps))

    def _check_adapter(self) -> None:
        """Raise ConfigError for a model that an adapter cannot be trained on, or not be read with."""
        if self.model.init == "scratch":
            raise ConfigError(
                f"adapter.rank = {self.adapter.rank}: is for a model that has been trained, and model.init = "
                '"scratch" draws a new one; set model.path, or leave adapter out'
            )
        if self.model.rope is not None and not self.adapter.merge:
            raise ConfigError(
                f"model.rope = {self.model.rope}: an adapter's folder has no config that could say so; set "
                "adapter.merge = true"
            )

    def _check_step(self) -> None:
        """Raise ConfigError for options of ``StepConfig`` that exclude each other, naming their key in the file."""
        memory = self.memory
        layers = (
            1
            if memory.layers_per_checkpoint == "auto"
            else memory.layers_per_checkpoint
        )
        step = self.step_config(
            "attention" if memory.checkpoint == "auto" else memory.checkpoint, layers
        )
        for what, check in (
            (f"memory.folds = {memory.folds}", check_beside_folds),
            (f"model.compile = {shown(self.model.compile)}", check_beside_compile),
        ):
            try:
                check(step)
            except (ConfigError, LayoutError) as error:
                raise ConfigError(f"{what}: {error}") from None

    def require_extras(self) -> None:
        require("training", "datasets")
        self.adapter.require_extras()
        self.optimizer.require_extras()
        if self.profile:
            require("profile = true", "matplotlib")

    def step_config(
        self, checkpoint: CheckpointName, layers_per_checkpoint: int
    ) -> StepConfig:
        """Return the options of ``parallelize``, with the memory options that "auto" chose."""
        options = step_options(self.model, self.attention, self.memory, self.optimizer)
        chosen = {
            "checkpoint": checkpoint,
            "layers_per_checkpoint": layers_per_checkpoint,
        }
        return StepConfig(**options | chosen, compute_dtype=self.model.dtype)

    def resolve_mesh(self, world_size: int) -> tuple[int, int]:
        """Return (replicate, ring) for this number of processes; the sequence is known to fill the ring."""
        replicate, tp = self.mesh.replicate, self.mesh.tp
        what, others = f"mesh.replicate = {replicate}", replicate * tp
        if tp > 1:
            what += f" times mesh.tp = {tp}"
        if self.mesh.ring is None and world_size % others:
            divisors = ", ".join(
                str(n) for n in range(1, world_size + 1) if world_size % n == 0
            )
            raise ConfigError(
                f"{what}: does not divide the {world_size} processes; use one of {divisors}"
            )
        ring = world_size // others if self.mesh.ring is None else self.mesh.ring
        if ring * others != world_size:
            raise ConfigError(
                f"mesh.ring = {ring}: times {what} needs {ring * others} processes, but there "
                f"are {world_size}; start {ring * others}, or change the mesh"
            )
        length = self.data.sequence_length_tokens
        needed = batch_layout(self.attention.layout, length, ring).granularity
        if length < needed:
            raise ConfigError(
                f"data.sequence_length_tokens = {length}: a {self.attention.layout} ring of {ring} needs at least "
                f"{needed}; lengthen the sequence or shrink the ring"
            )
        if self.attention.route != "auto":
            try:
                Route.parse(self.attention.route, ring).check_sent_as(
                    codec(self.attention.comm_dtype)
                )
            except UnsupportedError as error:
                raise ConfigError(f"attention.route: {error}") from None
        return replicate, ring
