"""A trainer's watch for a slow rank or link."""

import logging
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ringspan.torch.model.consistency.speed import SpeedWatch

_log = logging.getLogger("ringspan")


class WatchSpeed(TrainerCallback):
    """Watches the steps of a trainer; on every rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._watch: SpeedWatch | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The latest comparison of ranks, for the trainer's logs."""
        return {} if self._watch is None else self._watch.metrics

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        folder = Path(str(args.output_dir))
        self._watch = SpeedWatch(self._mesh, folder, _log.warning)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        if self._watch is not None:
            self._watch.step(state.global_step)

    def close(self) -> None:
        """Stop watching, also after an error."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
