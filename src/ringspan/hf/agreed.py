"""Agreement of all ranks on what a user's code decides on one."""

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from ringspan.hf.seams import method_behind
from ringspan.torch.consistency.calls import Call, check_call, hear_all
from ringspan.torch.consistency.loop_watch import in_call

if TYPE_CHECKING:
    from ringspan.hf.trainer import RingTrainerMixin

# After these a trainer looks at what callbacks have asked for, or returns. Of the others it is agreed on then.
_EVENTS: Final = frozenset(
    f"on_{event}" for event in ("substep_end", "step_end", "epoch_end", "evaluate", "predict", "save", "train_end")
)


class AgreedCallbacks(CallbackHandler):
    """Mix-in for a trainer's callbacks: any rank's request (to stop, save, evaluate, log) holds for all."""

    ring_mesh: DeviceMesh

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        control = super().call_event(event, args, state, control, **kwargs)
        return self._agreed(event, control) if event in _EVENTS else control

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: object, **kwargs: object
    ) -> TrainerControl:
        """Call Trainer's event, and agree unless a user calls ``trainer.log``, usually on one rank."""
        is_trainers = control.should_log
        control = super().on_log(args, state, control, logs, **kwargs)
        return self._agreed("on_log", control) if is_trainers else control

    def _agreed(self, event: str, control: TrainerControl) -> TrainerControl:
        asked = [field.name for field in fields(control) if getattr(control, field.name)]
        with in_call(event):
            for name in {name for each in hear_all(self.ring_mesh, Call(event, said=asked)) for name in each}:
                setattr(control, name, True)
        return control


def agree_on(trainer: "RingTrainerMixin") -> None:
    """Agree in place on callbacks' requests, the first rank's metrics, and errors of user functions."""
    handler: Any = trainer.callback_handler
    mesh = trainer.ring_mesh
    handler.__class__, handler.ring_mesh = AgreedCallbacks, mesh
    own = ["compute_loss_func", "preprocess_logits_for_metrics", "compute_metrics"]
    if not method_behind(trainer, "compute_loss").__module__.startswith(("transformers.", "trl.", "ringspan.")):
        own.append("compute_loss")
    for name in own:
        if callable(function := getattr(trainer, name, None)):
            setattr(trainer, name, _agreed(function, name, mesh))


def _agreed(function: Callable[..., Any], name: str, mesh: DeviceMesh) -> Callable[..., Any]:
    @functools.wraps(function)
    def agreed(*args: object, **kwargs: object) -> object:
        result = function(*args, **kwargs)
        with in_call(name):
            if name == "compute_metrics":
                return hear_all(mesh, Call(name, said=result))[0]
            check_call(mesh, Call(name))
        return result

    return agreed
