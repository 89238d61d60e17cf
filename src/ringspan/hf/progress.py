"""A trainer's checkpoint without the model: optimizer state in shards for any mesh, replicas' random numbers."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ringspan.checkpoints.background import Background
from ringspan.checkpoints.checkpoint import Checkpoints, Snapshot, snapshot
from ringspan.checkpoints.shards import Part
from ringspan.checkpoints.state import load_state, model_facts, run_state
from ringspan.core.errors import CheckpointError
from ringspan.core.files.named import ADAPTER_WEIGHTS
from ringspan.core.messages.lines import first_change
from ringspan.torch.model.adapters import base_of, is_peft
from ringspan.torch.model.memory.adamw import own_state

FOLDER: Final = "ring_optimizer"
_RUN: Final = "trainer"  # one name for all, since a folder holds one save


def save_optimizer(
    folder: Path, model: PreTrainedModel, optimizer: Optimizer, step: int
) -> None:
    """Write this rank's part of the optimizer state; raise CheckpointError on all ranks if one fails."""
    with closing(Background()) as background:
        taken = optimizer_snapshot(model, optimizer, step)
        write_optimizer(folder, taken, background)


def optimizer_snapshot(
    model: PreTrainedModel, optimizer: Optimizer, step: int
) -> Snapshot:
    """Copy this rank's part of the optimizer state."""
    base: Any = base_of(model)
    sizes = {
        name: base.ring_mesh.get_group(name).size()
        for name in base.ring_mesh.mesh_dim_names
    }
    return snapshot(
        step,
        _state(model, optimizer),
        own_state(optimizer),
        {"groups": _settings(optimizer), "model": model_facts(model)},
        mesh=sizes,
        layout=base.ring_layout,
    )


def write_optimizer(folder: Path, taken: Snapshot, background: Background) -> None:
    """Write a copy of the optimizer state; all ranks call it. CheckpointError on all if one fails."""
    place = folder / FOLDER
    Checkpoints(place, run_id=_RUN, keep=1, background=background).write(taken)


def load_optimizer(folder: Path, model: PreTrainedModel, optimizer: Optimizer) -> None:
    """Load ``save_optimizer``'s state of any mesh. Errors are raised on all ranks."""
    if not (folder / FOLDER).is_dir():
        advice = (
            "; it was saved without a ring"
            if (folder / "optimizer.pt").is_file()
            else ""
        )
        raise CheckpointError(
            f"{folder}: has no {FOLDER}{advice}; load the model from it and start a new run, or train with "
            "save_only_model=False"
        )
    with closing(
        Checkpoints(folder / FOLDER, run_id=_RUN, keep=1, asynchronous=False)
    ) as checkpoints:
        found = checkpoints.find()
        if found.folder is None or found.manifest is None:
            raise CheckpointError(
                found.skipped[0]
                if found.skipped
                else f"{folder / FOLDER}: is empty; use another"
            )
        before = found.manifest.state
        if (
            change := first_change(before["model"], model_facts(model))
            if "model" in before
            else None
        ):
            raise CheckpointError(
                f"{folder}: was trained with {change}; set it back, or start a new run"
            )
        load_state(
            checkpoints,
            found.folder,
            found.manifest,
            _state(model, optimizer),
            optimizer,
            {},
        )
        for group, settings in zip(
            optimizer.param_groups, before["groups"], strict=True
        ):
            group |= {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in settings.items()
            }


def _state(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Tensor | Part]:
    return {
        name: value
        for name, value in run_state(model, optimizer).items()
        if name.startswith("optimizer/")
    }


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {
            name: x.item() if isinstance(x, Tensor) else x
            for name, x in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def load_adapter(folder: Path, model: PreTrainedModel) -> bool:
    """Fill a PEFT model's adapter from a folder; return False if the model has none."""
    if not is_peft(model):
        return False
    from peft import load_peft_weights, set_peft_model_state_dict

    peft: Any = model
    for name in peft.peft_config:
        place = folder if name == "default" else folder / name
        if not (place / ADAPTER_WEIGHTS).is_file():
            raise CheckpointError(
                f"{place / ADAPTER_WEIGHTS}: is missing; use a checkpoint of this adapter"
            )
        result: Any = set_peft_model_state_dict(
            model, load_peft_weights(str(place), device="cpu"), adapter_name=name
        )
        if result.unexpected_keys:
            raise CheckpointError(
                f"{place}: has {result.unexpected_keys[0]}, which {name!r} lacks; use one of that adapter"
            )
    return True


@contextmanager
def random_state_folder(folder: Path, index: int, world_size: int) -> Iterator[str]:
    """Yield a folder with this rank's random numbers for Trainer, or another's if the run had fewer ranks."""
    own = f"rng_state_{index}.pth" if world_size > 1 else "rng_state.pth"
    there = [folder / name for name in (own, "rng_state_0.pth", "rng_state.pth")]
    source = next((path for path in there if path.is_file()), None)
    if source is None or source.name == own:
        yield str(folder)
        return
    with tempfile.TemporaryDirectory(prefix="ringspan-") as beside:
        os.symlink(source.resolve(), Path(beside, own))
        yield beside
