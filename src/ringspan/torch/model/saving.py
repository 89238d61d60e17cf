"""Saving of a model on a ring: piece by piece, or whole from rank 0's memory for other writers."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import UnsupportedError
from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.model.consistency.calls import Call, check_call, meeting
from ringspan.torch.model.consistency.loop_watch import in_call
from ringspan.torch.model.consistency.optimizers import optimizer_facts
from ringspan.torch.model.layers.modules import class_name, whole
from ringspan.torch.model.layers.positions import as_trained
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.memory.sharding import settle
from ringspan.torch.model.weights.packed import has_packed
from ringspan.torch.model.weights.writing import (
    MAX_SHARD_SIZE,
    Vote,
    missing_room,
    plan_weights,
    put_in_place,
    scratch_in,
    write_weights,
)

_NOT_SAVED: Final = {
    "push_to_hub": "save to a folder, then huggingface_hub.upload_folder",
    "distributed_checkpoint": "leave it out: what is written is a folder of transformers",
}


class Saved:
    ring_mesh: DeviceMesh

    def save_pretrained(
        self: Any, save_directory: str | os.PathLike[str], **kwargs: object
    ) -> None:
        """Write a Hugging Face folder as ``PreTrainedModel.save_pretrained``, in files of ``max_shard_size`` (5GB).

        Every rank calls it. Rank 0 writes pieces of tensors, and replaces earlier weights when all are complete.
        ``state_dict``, and models with their own adapters, need all weights in rank 0's memory.

        Raises:
            UnsupportedError: ``push_to_hub`` or ``distributed_checkpoint``.
            OSError: writing failed (disk full); PeerMismatch on other ranks.
        """
        save: Any = super().save_pretrained  # pyright: ignore[reportAttributeAccessIssue]
        is_writer = dist.get_rank() == int(self.ring_mesh.mesh.min())
        kwargs["is_main_process"] = is_writer
        with in_call("saving the model"), as_trained(self):
            is_streamed = kwargs.get("state_dict") is None and not getattr(
                self, "_hf_peft_config_loaded", False
            )
            refuse_saving(self, kwargs, is_streamed=is_streamed)
            if is_streamed:
                stream(self, Path(save_directory), save, kwargs, is_writer=is_writer)
            else:
                if kwargs.get("state_dict") is None:
                    kwargs["state_dict"] = whole_weights(self)
                voted(
                    self,
                    "the end of saving the model",
                    lambda: save(save_directory, **kwargs),
                )


def refuse_saving(
    model: RingModel, options: dict[str, Any], *, is_streamed: bool
) -> None:
    with meeting(model.ring_mesh, "saving the model") as facts:
        for name, remedy in _NOT_SAVED.items():
            if options.pop(name, False):
                raise UnsupportedError(
                    f"save_pretrained({name}=True) is not for a model on a ring; {remedy}"
                )
        if is_streamed and has_packed(model):
            raise UnsupportedError(
                f"{class_name(model)} has packed weights, which training does not change; save its adapter (PEFT's "
                "save_pretrained), and the model before parallelize"
            )
        given = {
            name: options.get(name)
            for name in ("max_shard_size", "variant", "save_original_format")
        }
        facts.alike = {
            **optimizer_facts(model),
            **given,
            "without state_dict": is_streamed,
        }


def stream(
    model: RingModel,
    folder: Path,
    save: Any,
    options: dict[str, Any],
    *,
    is_writer: bool,
) -> None:
    """Write the model's folder file by file, so that no rank holds all weights; every rank calls it.

    ``save`` writes config and code without weights into a scratch folder, then ranks gather one file's weights at a
    time for the writer, and the finished folder is moved into place. An error on one rank raises on all.
    """
    # After a forward pass without a backward pass FSDP still holds whole copies of the outermost weights. The first
    # call that asks for parameters would free them while they are read.
    settle(model)
    size, variant = (
        options.get("max_shard_size", MAX_SHARD_SIZE),
        options.get("variant"),
    )
    original = options.get("save_original_format", True)
    plan = plan_weights(
        model,
        model.ring_mesh,
        max_shard_size=size,
        variant=variant,
        save_original_format=original,
    )

    def vote(what: str, error: Exception | None) -> None:
        check_call(model.ring_mesh, Call(what, error=error))

    with ExitStack() as stack:
        scratch: Any = None

        def prepare() -> None:
            nonlocal scratch
            if problem := missing_room(folder, plan.num_bytes):
                raise OSError(errno.ENOSPC, problem)
            scratch = stack.enter_context(scratch_in(folder))
            save(scratch, **options | {"state_dict": {}})

        def finish() -> None:
            plan.write_index(scratch, model.num_parameters())
            put_in_place(scratch, folder, plan)

        voted(model, "saving the model", prepare if is_writer else lambda: None)
        write_weights(plan, scratch, vote)
        voted(
            model, "the end of saving the model", finish if is_writer else lambda: None
        )


def begin_saving(
    model: Any, folder: Path, group: dist.ProcessGroup
) -> Callable[[Path, Vote], None]:
    """Write a model's folder without its weights, and copy these; return what writes them later, into any folder.

    All ranks call both, the second during training: it exchanges over ``group`` alone. An adapter, and a model with
    adapters of its own, are written with their weights at once.
    """
    ours: Any = model
    if not isinstance(model, Saved) or getattr(model, "_hf_peft_config_loaded", False):
        ours.save_pretrained(folder)
        return lambda folder, vote: None
    is_writer = dist.get_rank() == int(ours.ring_mesh.mesh.min())
    save: Any = super(Saved, ours).save_pretrained  # pyright: ignore[reportAttributeAccessIssue]
    with in_call("saving the model"), as_trained(ours):
        refuse_saving(ours, {}, is_streamed=True)
        settle(ours)
        plan = plan_weights(ours, ours.ring_mesh, group, max_shard_size=MAX_SHARD_SIZE)
        num_parameters = ours.num_parameters()

        def prepare() -> None:
            if is_writer:
                save(folder, state_dict={}, is_main_process=True)

        voted(ours, "saving the model", prepare)

    def write(folder: Path, vote: Vote) -> None:
        problem = missing_room(folder, plan.num_bytes) if is_writer else None
        vote("saving the model", OSError(errno.ENOSPC, problem) if problem else None)
        write_weights(plan, folder if is_writer else None, vote)
        if is_writer:
            plan.write_index(folder, num_parameters)

    return write


def voted(model: RingModel, what: str, work: Callable[[], Any]) -> None:
    """Call ``work`` on this rank; raise on every rank if it fails on any."""
    with meeting(model.ring_mesh, what):
        work()


def whole_weights(
    model: RingModel, choose: Callable[[dict[str, Any]], list[str]] | None = None
) -> dict[str, Any]:
    """Return all weights, or those rank 0 chooses, in host memory on rank 0; none on others."""
    check_call(model.ring_mesh, Call("saving the model", optimizer_facts(model)))
    with _unadvised():
        if choose is None:
            return get_model_state_dict(
                model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
        sharded: Any = get_model_state_dict(model)
        is_writer, chosen = (
            dist.get_rank() == int(model.ring_mesh.mesh.min()),
            list[str](),
        )
        voted(
            model,
            "choosing what to save",
            lambda: chosen.extend(choose(sharded)) if is_writer else None,
        )
        found: dict[str, Any] = {}
        for name in gather_over(model.ring_mesh, chosen)[0]:
            weight = whole(sharded[name])
            if is_writer:
                found[name] = weight.detach().cpu()
        return found


@contextmanager
def _unadvised() -> Iterator[None]:
    """Silence DTensor's advice on gathering twice-split tensors faster: it is done once."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
