"""An accelerator that counts a ring as one process: it distributes, gathers and averages per replica."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.hf.batches import takes_whole_batches
from ringspan.hf.config import RingConfig
from ringspan.hf.seams import note_prepared
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.model.consistency.calls import exchanging
from ringspan.torch.model.layers.modules import whole
from ringspan.torch.model.view import is_classifier

_REDUCTIONS: Final = ("sum", "mean", "none")


class RingAccelerator(Accelerator):
    """Mix-in of ``count_rings`` for an accelerator. ``is_main_process`` and the like still concern processes."""

    ring_mesh: DeviceMesh
    ring_config: RingConfig

    @property
    def num_processes(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Number of replicas."""
        return self.ring_mesh.get_group("replicate").size()

    @property
    def process_index(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Index of this rank's replica."""
        return self.ring_mesh.get_local_rank("replicate")

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Return the model on the ring, never wrapped.

        For evaluation, a model without a head (a reward model) as it is.
        """
        head = getattr(model, "get_output_embeddings", None)
        if (
            evaluation_mode
            and (head is None or head() is None)
            and not is_classifier(model)
        ):
            return super().prepare_model(model, device_placement, evaluation_mode)
        takes_whole_batches(
            model,
            self.ring_mesh,
            self.ring_config,
            self.autocast if self.native_amp else None,
        )
        note_prepared(self, model)
        return model

    def backward(self, loss: Tensor, **kwargs: object) -> None:
        """Call ``Accelerator.backward``, in which ranks exchange."""
        with exchanging():
            super().backward(loss, **kwargs)

    def gather(self, tensor: object) -> object:
        """Concatenate all replicas' tensors along the first dimension."""
        return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def _gather_one(self, tensor: Tensor) -> Tensor:
        if self.num_processes == 1:
            return tensor
        tensor = (tensor[None] if tensor.ndim == 0 else tensor).contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        dist.all_gather(parts, tensor, group=self.ring_mesh.get_group("replicate"))
        return torch.cat(parts)

    def reduce(
        self, tensor: object, reduction: str = "sum", scale: float = 1.0
    ) -> object:
        assert reduction in _REDUCTIONS, f"reduction={reduction!r}"

        def one(tensor: Tensor) -> Tensor:
            total = tensor.clone()
            if reduction == "none":
                return total
            dist.all_reduce(total, group=self.ring_mesh.get_group("replicate"))
            return (
                total * scale
                if reduction == "sum"
                else total * (scale / self.num_processes)
            )

        return recursively_apply(one, tensor, error_on_other_type=True)

    def pad_across_processes(
        self, tensor: object, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> object:
        """Pad along a dimension to the longest of all replicas."""

        def one(tensor: Tensor) -> Tensor:
            if dim >= tensor.ndim or self.num_processes == 1:
                return tensor
            size = torch.tensor(tensor.shape[dim], device=tensor.device)
            dist.all_reduce(
                size, dist.ReduceOp.MAX, group=self.ring_mesh.get_group("replicate")
            )
            shape = list(tensor.shape)
            shape[dim] = int(size) - tensor.shape[dim]
            padding = tensor.new_full(shape, pad_index)
            return torch.cat((padding, tensor) if pad_first else (tensor, padding), dim)

        return recursively_apply(one, tensor, error_on_other_type=True)

    @contextmanager
    def split_between_processes(
        self,
        inputs: list[Any] | tuple[Any, ...] | dict[str, Any] | Tensor,
        apply_padding: bool = False,
    ) -> Iterator[Any]:
        """Yield this replica's part of the inputs."""
        replica: Any = SimpleNamespace(
            num_processes=self.num_processes,
            process_index=self.process_index,
            device=self.device,
        )
        with PartialState.split_between_processes(
            replica, inputs, apply_padding
        ) as part:
            yield part

    def check_trigger(self) -> bool:
        """Return True if any rank of any ring has called ``set_trigger`` since the last True."""
        is_set = any(
            gather_over(
                self.ring_mesh, self.flag_tensor is not None and bool(self.flag_tensor)
            )
        )
        if is_set:
            self.flag_tensor = None
        return is_set

    def clip_grad_norm_(
        self, parameters: object, max_norm: float, norm_type: int = 2
    ) -> object:
        """Clip by the whole norm; return it as a plain tensor on every rank."""
        norm: Any = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return whole(norm)


def without_repeats(
    accelerator: RingAccelerator, inputs: dict[str, Any]
) -> dict[str, Any]:
    """Mask the targets of examples repeated to even out the last batch; streams and packed rows still repeat."""
    state, labels = (
        accelerator.gradient_state,
        inputs.get("labels") if isinstance(inputs, Mapping) else None,
    )
    if not (
        state.end_of_dataloader and state.remainder > 0 and isinstance(labels, Tensor)
    ):
        return inputs
    # In packed batches a row is not an example.
    rows, loader = len(labels), cast("Any", state.active_dataloader)
    if rows * accelerator.num_processes != loader.total_batch_size:
        return inputs
    places = torch.arange(rows, device=labels.device) + accelerator.process_index * rows
    is_repeated = (places >= state.remainder).view(-1, *[1] * (labels.ndim - 1))
    return {**inputs, "labels": labels.masked_fill(is_repeated, IGNORED)}


def count_rings(
    accelerator: Accelerator, mesh: DeviceMesh, config: RingConfig
) -> RingAccelerator:
    ours: Any = accelerator
    ours.__class__ = RingAccelerator
    ours.ring_mesh, ours.ring_config = mesh, config
    # Otherwise one process may read a stream for all others, batch by batch.
    if ours.dataloader_config.dispatch_batches is None:
        ours.dataloader_config.dispatch_batches = False
    return ours
