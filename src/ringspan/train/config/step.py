"""Options of a training step, from a training file or its ``key=value`` settings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ringspan.core.step_config import StepConfig
from ringspan.train.config.load import apply_override, load_config, parse_config
from ringspan.train.config.problems import Table, shown, table_of
from ringspan.train.config.tables import TrainConfig, step_options

STEP, UPDATE, MODEL, BATCH = "step", "update", "model", "batch"
NAMED, BESIDE = "named", "beside"
"""A proof passes a key to ``parallelize`` or the mesh, takes its optimizer steps with it, makes its model or its
batches with it, names it as not tried if it is set, or leaves it out since no number of a step depends on it."""
KEYS: Final[dict[str, str]] = {
    **dict.fromkeys(("run", "seed", "steps", "profile"), BESIDE),
    **dict.fromkeys(("model.path", "model.init", "model.config", "model.rope"), MODEL),
    **dict.fromkeys(("model.dtype", "model.parameter_dtype"), MODEL),
    "model.trust_remote_code": MODEL,
    "model.tokenizer": BESIDE,
    "model.compile": STEP,
    **dict.fromkeys(("data.shared_prefix", "data.documents"), BATCH),
    **dict.fromkeys(("data.messages", "data.balance"), NAMED),
    **dict.fromkeys(("data.paths", "data.text_field", "data.hub_split"), BESIDE),
    **dict.fromkeys(("data.extensions", "data.eval_fraction"), BESIDE),
    **dict.fromkeys(("data.min_shared_tokens", "data.on_change"), BESIDE),
    "data.sequence_length_tokens": NAMED,
    **dict.fromkeys(("adapter.rank", "adapter.alpha", "adapter.dropout"), MODEL),
    **dict.fromkeys(("adapter.target_modules", "adapter.use_dora"), MODEL),
    "adapter.use_rslora": MODEL,
    "adapter.merge": BESIDE,
    **dict.fromkeys(("mesh.ring", "mesh.replicate", "mesh.tp"), STEP),
    **dict.fromkeys(("attention.layout", "attention.route"), STEP),
    **dict.fromkeys(("attention.comm_dtype", "attention.kernel"), STEP),
    **dict.fromkeys(("memory.checkpoint", "memory.layers_per_checkpoint"), STEP),
    **dict.fromkeys(("memory.folds", "memory.offload"), STEP),
    **dict.fromkeys(("memory.loss_chunk_tokens", "memory.loss_chunk_vocabulary"), STEP),
    **dict.fromkeys(
        ("memory.feedforward_chunk_tokens", "memory.norm_chunk_tokens"), STEP
    ),
    "memory.expert_slices": STEP,
    "memory.activation_bytes": NAMED,
    **dict.fromkeys(("optimizer.z_loss", "optimizer.label_smoothing"), STEP),
    "optimizer.index_loss": STEP,
    **dict.fromkeys(("optimizer.learning_rate", "optimizer.weight_decay"), NAMED),
    **dict.fromkeys(("optimizer.betas", "optimizer.eps"), NAMED),
    **dict.fromkeys(
        ("optimizer.warmup_steps", "optimizer.min_learning_rate_ratio"), NAMED
    ),
    "optimizer.clip_grad_norm": UPDATE,
    "optimizer.accumulation_steps": UPDATE,
    **dict.fromkeys(("optimizer.batch_size", "optimizer.name"), NAMED),
    **dict.fromkeys(("optimizer.state", "optimizer.on_host"), NAMED),
    "optimizer.rounding": NAMED,
    **dict.fromkeys(("evaluation.every_steps", "evaluation.num_sequences"), BESIDE),
    **dict.fromkeys(("checkpoints.every_steps", "checkpoints.keep"), BESIDE),
    "checkpoints.async_save": BESIDE,
    "watch_speed": BESIDE,
    **dict.fromkeys(("guard.non_finite", "guard.max_skipped_steps"), BESIDE),
    **dict.fromkeys(("guard.spike", "guard.spike_zscore"), BESIDE),
    **dict.fromkeys(("guard.spike_window_steps", "guard.max_rewinds"), BESIDE),
    **dict.fromkeys(("watchdog.enabled", "watchdog.timeout_steps"), BESIDE),
    **dict.fromkeys(("watchdog.min_seconds", "watchdog.patience_seconds"), BESIDE),
    "watchdog.silence_seconds": BESIDE,
}
# Required keys of a file, which settings on a command line leave out.
_REQUIRED: Final = {
    "data": {"paths": ["."], "sequence_length_tokens": 1 << 20},
    "model": {"path": "."},
}


@dataclass(frozen=True)
class AskedStep:
    """A training file's settings, the options of its step that a trial can take, and those that are only named."""

    settings: TrainConfig
    options: dict[str, Any]
    not_tried: tuple[str, ...]
    is_file: bool
    """True if a file named the model."""

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the mesh."""
        return self.settings.mesh.model_dump()


def read_step(settings: Sequence[str]) -> AskedStep:
    """Read a training file, if the first setting is one, and ``key=value`` settings; ConfigError for unknown keys."""
    is_file = bool(settings) and "=" not in settings[0]
    if is_file:
        config = load_config(settings[0], settings[1:])
    else:
        values: dict[str, Any] = {name: {**table} for name, table in _REQUIRED.items()}
        for setting in settings:
            apply_override(values, setting)
        config = parse_config(values)
    plain = StepConfig()
    tables = config.model, config.attention, config.memory, config.optimizer
    options, not_tried = dict[str, Any](), list[str]()
    for name, value in step_options(*tables).items():
        # What "auto" chooses depends on sizes that a small model does not have.
        if value == "auto" and name != "route":
            if name == "checkpoint":
                not_tried.append("memory.checkpoint=auto (it depends on sizes)")
        elif value != getattr(plain, name):
            options[name] = value
    options |= _of_update(config, is_file=is_file)
    not_tried += _named(config, is_file=is_file)
    return AskedStep(config, options, tuple(not_tried), is_file)


def _of_update(config: TrainConfig, *, is_file: bool) -> dict[str, Any]:
    """Return the options of an optimizer step that are set; a file's step has the defaults of the others too."""
    found: dict[str, Any] = {}
    for key in (key for key, how in KEYS.items() if how == UPDATE):
        table, _, name = key.partition(".")
        values = getattr(config, table)
        if is_file or name in values.model_fields_set:
            found[name] = getattr(values, name)
    return found


def _named(config: TrainConfig, *, is_file: bool) -> Iterator[str]:
    """Yield the keys that are set to something else than their default, and that a trial does not take."""
    for key, value in _set_keys(config):
        is_given = is_file or key != "data.sequence_length_tokens"
        if KEYS.get(key) == NAMED and is_given:
            yield f"{key}={shown(value)}"


def _set_keys(table: Table, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if table_of(field):
            yield from _set_keys(value, f"{name}.")
        elif name in table.model_fields_set and value != field.default:
            yield path + name, value
