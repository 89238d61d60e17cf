"""Sequences in folds, as the base sees them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ringspan.core import mechanisms
from ringspan.core.errors import UnsupportedError
from ringspan.core.step_config import StepConfig, check_beside_folds
from ringspan.torch.mechanisms.folds.passes import in_folds
from ringspan.torch.model.consistency.loop_watch import watch_backward
from ringspan.torch.model.layers.view import ModelView, RingModel
from ringspan.torch.model.local_pass import LocalPass
from ringspan.torch.model.mechanism import Mechanism, Sharding
from ringspan.torch.model.tasks.causal_lm import (
    Asked,
    PerToken,
    asked_in,
    gathered_tokens,
    local_logprobs,
    output_of,
    whole_length,
)


class FoldsMechanism(Mechanism):
    name = mechanisms.FOLDS

    def found_in(self, view: ModelView, config: StepConfig) -> str:
        return _shown(config.folds)

    def refuse(self, view: ModelView, config: StepConfig, mesh: DeviceMesh) -> None:
        if config.folds == 1:
            return
        check_beside_folds(config)
        if view.head is None:
            raise UnsupportedError(
                f"{_shown(config.folds)}: {view.name} has no head that predicts tokens, whose loss folds add up; use "
                "folds=1"
            )

    def found_in_batch(self, batch: Mapping[str, Any], how: Sharding) -> str:
        return _shown(how.folds)

    def runs(self, model: RingModel) -> Callable[..., Any] | None:
        return _run if model.ring_folds > 1 else None

    def begin(self, now: LocalPass) -> None:
        now.part = now.given.get("fold")


def _shown(folds: int) -> str:
    return f"folds={folds}" if folds > 1 else ""


def _run(
    model: RingModel, call: Callable[..., Any], arguments: dict[str, Any]
) -> object:
    """Run a pass in folds: the loss, the numbers of local tokens, or the log-probabilities of all."""
    asked = asked_in(arguments)
    if asked is Asked.LOGPROBS:
        lengths = arguments.get("document_lengths")
        length = whole_length(int(arguments["sequence_length"]), lengths)
        local = PerToken(asked.value, local_logprobs)
        found = in_folds(model, call, arguments | {"ring_asked": local})
        return watch_backward(gathered_tokens(model, found, length, lengths))
    found = watch_backward(in_folds(model, call, arguments))
    return output_of(None, **{"logits" if found.ndim else "loss": found})
