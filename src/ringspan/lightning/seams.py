"""Every private name of Lightning that ``ringspan.lightning`` uses; a test names what a release moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, RandomSampler


def give_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    private: Any = module
    private._device_mesh = mesh


class Dealing:
    """A rank's examples, in the order of the user's loader.

    Lightning's own training sampler shuffles even if the user's does not, so it is kept from that, and asked for the
    same sampler again with the loader's order.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._connector: Any = trainer._accelerator_connector
        self._data: Any = trainer._data_connector
        self._is_wanted: bool = self._connector.use_distributed_sampler
        self._is_ours = False

    def take_over(self, *, ours: bool) -> None:
        """Stop Lightning from dealing examples out, or let it, by ``Trainer(use_distributed_sampler=...)``."""
        self._is_ours = ours
        self._connector.use_distributed_sampler = self._is_wanted and not ours

    def dealt(self, loader: object, stage: object) -> object:
        """Return the loader of this rank's examples, unless Lightning dealt them out."""
        if not self._is_ours or not isinstance(loader, DataLoader):
            return loader
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        with self._as_wanted():
            return self._data._prepare_dataloader(loader, shuffle=isinstance(sampler, RandomSampler), mode=stage)

    @contextmanager
    def _as_wanted(self) -> Iterator[None]:
        before, self._connector.use_distributed_sampler = self._connector.use_distributed_sampler, self._is_wanted
        try:
            yield
        finally:
            self._connector.use_distributed_sampler = before
