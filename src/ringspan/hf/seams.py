"""Every private name of other libraries that ``ringspan.hf`` uses; a test names those that a release has moved."""

import inspect
import sys
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.trainer_utils import PredictionOutput, TrainOutput

from ringspan.core.errors import UnsupportedError
from ringspan.hf.progress import load_adapter, random_state_folder
from ringspan.hf.rollouts import of_first, rollout_of_replica
from ringspan.hf.routes import begin_routes
from ringspan.torch.model.consistency.calls import Call, check_call

if TYPE_CHECKING:

    class _Trainer(Trainer):
        """Methods whose arguments are passed on, since releases differ in them."""

        def __init__(self, *args: object, **kwargs: object) -> None: ...
        def train(self, *args: object, **kwargs: object) -> TrainOutput: ...
        def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]: ...
        def predict(self, *args: object, **kwargs: object) -> PredictionOutput: ...
        def log(
            self, logs: dict[str, float], *args: object, **kwargs: object
        ) -> None: ...
        def training_step(self, *args: object, **kwargs: object) -> Tensor: ...
        def compute_loss(
            self,
            model: nn.Module,
            inputs: dict[str, Any],
            *args: object,
            **kwargs: object,
        ) -> Any: ...
else:
    _Trainer = object  # the mix-in may precede any trainer

_TABLE: Final = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
OVERRIDDEN: Final[dict[str, dict[str, list[str]]]] = _TABLE["overridden"]
GATHERS: Final[dict[str, list[str]]] = _TABLE["gathers"]
SOURCE: Final[dict[str, list[str]]] = _TABLE["source"]
# Cached, since reading a trainer's class takes a sixth of a second.
_source: Final = cache(inspect.getsource)
# Stands for a class that a release lacks, and has none of its methods.
_GONE: Final = type(None)


class TrainerSeams(_Trainer):
    def _generate_and_score_completions(self: Any, inputs: object) -> Any:
        begin_routes(self.model)
        with rollout_of_replica(self):
            return super()._generate_and_score_completions(inputs)  # pyright: ignore[reportAttributeAccessIssue]

    def _get_tool_suffix_ids(self: Any, tool_messages: object) -> Any:
        # Taken from the ring's first rank, since a tool's answer on other ranks may differ, or fail.
        answer = super()._get_tool_suffix_ids(tool_messages)  # pyright: ignore[reportAttributeAccessIssue]
        return of_first(answer, self.ring_mesh)

    def _save_checkpoint(self: Any, model: nn.Module, trial: Any) -> None:
        save: Any = super()._save_checkpoint  # pyright: ignore[reportAttributeAccessIssue]
        if not self.ring.async_save:
            save(model, trial)
            # Callbacks on other ranks hear of a checkpoint that the first rank has finished.
            check_call(self.ring_mesh, Call("saving a checkpoint"))
            return
        run = Path(self._get_output_dir(trial=trial))
        self.begin_save(run, lambda: save(model, trial))

    def _get_output_dir(self: Any, trial: Any) -> str:
        if (local := self.ring_saves.local) is not None:
            return str(local)
        return super()._get_output_dir(trial)  # pyright: ignore[reportAttributeAccessIssue]

    def _push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        if self.ring_saves.local is not None:
            self.ring_saves.push_later()
        else:
            super()._push_from_checkpoint(checkpoint_folder)  # pyright: ignore[reportAttributeAccessIssue]

    def push_saved(self: Any, folder: str) -> None:
        """Upload a checkpoint that is complete, as the trainer does."""
        self._push_from_checkpoint(folder)

    def _finalize_training(
        self: Any, trial: Any, num_train_samples: int, start_time: float
    ) -> TrainOutput:
        # Trainer loads the best checkpoint and removes others next.
        self.control = self.finish_save(self.control)
        return super()._finalize_training(trial, num_train_samples, start_time)  # pyright: ignore[reportAttributeAccessIssue]


class OwnParts(Trainer):
    """Mix-in right before transformers' Trainer for its private methods: subclasses' own run first."""

    def _save(
        self: Any, output_dir: str | None = None, state_dict: object = None
    ) -> None:
        self.save_beside_model(output_dir)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        self.save_progress(output_dir)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.load_progress(checkpoint)

    def _load_from_checkpoint(
        self: Any, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not load_adapter(Path(resume_from_checkpoint), self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self: Any) -> None:
        if not load_adapter(Path(self.state.best_model_checkpoint), self.model):
            super()._load_best_model()

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is not None:
            index, ranks = self.args.process_index, self.args.world_size
            with random_state_folder(Path(checkpoint), index, ranks) as folder:
                super()._load_rng_state(folder)


def note_prepared(accelerator: Accelerator, model: nn.Module) -> None:
    if not any(model is known for known in accelerator._models):
        accelerator._models.append(model)


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def method_behind(trainer: object, name: str) -> FunctionType:
    """Return a trainer's method that the ring's mix-in overrides."""
    owners = (
        kind
        for kind in type(trainer).__mro__
        if name in vars(kind) and kind.__name__ != "RingTrainerMixin"
    )
    return vars(next(owners))[name]


def moved() -> list[str]:
    """Name the seams that installed releases no longer have; TRL's only if it is in use."""
    found: list[str] = []
    for place, methods in OVERRIDDEN.items():
        owner = _find(place)
        if owner is None:
            continue
        for name, parameters in methods.items():
            method = getattr(owner, name, None)
            if (
                method is None
                or list(inspect.signature(method).parameters)[1:] != parameters
            ):
                found.append(f"{place}.{name}")
    for module, names in GATHERS.items():
        space = vars(sys.modules.get(module, sys))
        found += [
            f"{module}.{name}"
            for name in names
            if module in sys.modules and name not in space
        ]
    for place, texts in SOURCE.items():
        owner = _find(place)
        if owner is _GONE:
            found.append(place)
        elif owner is not None:
            found += [
                f"{place}: {text}" for text in texts if text not in _source(owner)
            ]
    return found


def check_seams() -> None:
    """Raise UnsupportedError for releases whose trainers would not call us, with seam and releases."""
    if found := moved():
        used = [
            name
            for name in ("transformers", "accelerate", "trl")
            if name in sys.modules
        ]
        releases = ", ".join(
            f"{name} {import_module(name).__version__}" for name in used
        )
        raise UnsupportedError(
            f"{found[0]} is not as ringspan knows it in {releases}; install releases it supports"
        )


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    top = module.partition(".")[0]
    # TRL imports its trainers on first use, and with them what generates.
    is_late = module.endswith("_trainer") or ".generation." in module
    needed = module if is_late else top
    return (
        getattr(import_module(module), name, _GONE) if needed in sys.modules else None
    )
