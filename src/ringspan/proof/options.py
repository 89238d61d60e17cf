"""Options of ``parallelize`` and of an optimizer step in a trial: as given, smaller, or not tried."""

from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.core.step_config import StepConfig

_AS_GIVEN: Final = "as given"
_OF_TOKENS: Final = 7
_OF_VOCABULARY: Final = 13
_OF_EXPERTS: Final = 2
# Each option is tried as given, tried at a size that a trial's few tokens are cut by too, or not tried, for a reason.
OPTIONS: Final[dict[str, str | int]] = {
    **dict.fromkeys(
        ("layout", "route", "comm_dtype", "kernel", "checkpoint", "folds"), _AS_GIVEN
    ),
    **dict.fromkeys(
        ("layers_per_checkpoint", "z_loss", "label_smoothing", "offload"), _AS_GIVEN
    ),
    "compile": _AS_GIVEN,
    "loss_chunk_tokens": _OF_TOKENS,
    "loss_chunk_vocabulary": _OF_VOCABULARY,
    "feedforward_chunk_tokens": _OF_TOKENS,
    "norm_chunk_tokens": _OF_TOKENS,
    "expert_slices": _OF_EXPERTS,
    "index_loss": "not tried, since plain transformers has no such loss",
    "compute_dtype": "not tried beside dtype, which says what layers compute in",
    "watchdog": "not tried, since it changes no number",
}
# Options of an optimizer step, off if 1 or 0, and the most that a trial takes: its gradients have norms above this one.
ACCUMULATION, CLIP = "accumulation_steps", "clip_grad_norm"
OF_UPDATE: Final[dict[str, int | float]] = {ACCUMULATION: 2, CLIP: 0.1}


def update_of_trial(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer step, at most as large as a trial takes them; ConfigError."""
    found: dict[str, Any] = {}
    for name, most in OF_UPDATE.items():
        value, off = options.get(name), 1 if name == ACCUMULATION else 0
        if value is None:
            continue
        is_number = type(value) is int or (name == CLIP and type(value) is float)
        if not is_number or not value >= off:
            raise ConfigError(
                f"{name}={value!r}; use {'an integer' if off else 'a number'} from {off}"
            )
        if value > off:
            found[name] = min(value, most)
    return found


def options_of_trial(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that a trial takes, and those that it does not take, each with its value and the reason.

    Options at their defaults are left out. Sizes of blocks are at most a few tokens, so that there are several blocks;
    a limit of the gradient's norm is at most a small one, so that it binds.
    """
    plain, untried = StepConfig(), list[str]()
    tried = update_of_trial(options)
    for name, value in options.items():
        if name in OF_UPDATE:
            continue
        how = OPTIONS.get(name, _AS_GIVEN)  # ``parallelize`` refuses an unknown one
        if value == getattr(plain, name, None):
            continue
        if isinstance(how, int):
            is_size = type(value) is int and value > 0
            tried[name] = min(value, how) if is_size else value
        elif how == _AS_GIVEN:
            tried[name] = value
        else:
            untried.append(f"{name}={value} ({how.removeprefix('not tried, ')})")
    return tried, untried
