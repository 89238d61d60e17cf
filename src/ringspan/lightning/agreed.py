"""Agreement of all ranks on requests that a user's code makes to Lightning's Trainer on one rank, and on its errors."""

from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.distributed.device_mesh import DeviceMesh

from ringspan.torch.consistency.calls import Call, hear_all
from ringspan.torch.consistency.loop_watch import in_call


class ToldErrors(Callback):
    """The first of a trainer's callbacks: other ranks hear of an error before the next ones save, with all ranks."""

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.strategy.on_exception(exception)


class AgreedStop(Callback):
    """The last of a trainer's callbacks: all ranks stop if ``trainer.should_stop`` is set on any."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def _agree(self, trainer: Trainer, event: str) -> None:
        with in_call(event):
            trainer.should_stop = any(hear_all(self._mesh, Call(event, said=bool(trainer.should_stop))))

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Agree before the first batch."""
        self._agree(trainer, "the start of training")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Agree before Lightning asks for another batch."""
        self._agree(trainer, "the end of a training batch")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Agree before gradients are clipped together."""
        self._agree(trainer, "an optimizer step")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._agree(trainer, "the end of a validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._agree(trainer, "the end of an epoch")

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Agree, so that no rank is gone when another raises."""
        self._agree(trainer, "the end of training")
