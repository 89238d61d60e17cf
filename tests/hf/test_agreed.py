"""What a user's code does or asks for on one rank alone: all ranks do it, or raise it, and none waits for another."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from ringspan.torch.runtime.mesh import timeout_seconds
from tests.cases import long
from tests.hf.trainers import Examples, plain

# One for each exchange that the others come to next; of replicas, before they gather from each other.
OF_REPLICAS = ("data", "preprocess_logits_for_metrics")
PLACES = (
    "compute_loss_func",
    "compute_metrics",
    "substep_end",
    "optimizer_step",
    "log",
    "train_end",
)


class Odd(TrainerCallback):
    """Does something on the last rank alone, where it is, and notes what the trainer does."""

    def __init__(self, mesh: Any) -> None:
        self.is_odd = mesh is None or mesh.get_rank() == mesh.size() - 1
        self.at, self.sets, self.done = "", "", list[str]()

    def come_to(self, place: str, control: Any = None) -> None:
        self.done += [place] * (place in ("log", "evaluate", "save", "step_end"))
        if not (self.is_odd and place == self.at):
            return
        if not self.sets:
            raise OSError(f"no paper at {place}")
        setattr(control, self.sets, True)
        self.at = ""


for _event in (
    name.removeprefix("on_") for name in vars(TrainerCallback) if name.startswith("on_")
):
    setattr(
        Odd,
        f"on_{_event}",
        lambda self, args, state, control, _event=_event, **_: self.come_to(
            _event, control
        ),
    )


class Data(Examples):
    """Examples that are read where something is done."""

    odd: Any = None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.odd.come_to("data")
        return super().__getitem__(index)


def made(mesh: Any, folder: str, **options: Any) -> tuple[Any, Odd]:
    """A trainer that comes to every place in two steps, on one process without a mesh, and its callback."""
    odd, data = Odd(mesh), Data(16, length=9)
    data.odd = odd

    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        odd.come_to("compute_loss_func")
        return outputs.logits.square().mean()

    def top(logits: Tensor, labels: Tensor) -> Tensor:
        odd.come_to("preprocess_logits_for_metrics")
        return logits.argmax(-1)

    def metrics(_: Any) -> dict[str, float]:
        odd.come_to("compute_metrics")
        return {"of": float(mesh is not None and odd.is_odd)}

    given = {
        "callbacks": [odd],
        "train_dataset": data,
        "eval_dataset": Examples(4, length=9),
        "max_steps": 2,
    }
    given |= {
        "compute_metrics": metrics,
        "preprocess_logits_for_metrics": top,
        "compute_loss_func": loss_of,
    }
    trainer = plain(
        mesh, "llama", None if mesh is None else {}, folder, given | options
    )
    return trainer, odd


def raised(mesh: Any, folder: str, places: tuple[str, ...]) -> dict[str, str]:
    """By where the last rank raises: what a run of this rank raises."""
    found: dict[str, str] = {}
    trainer, odd = made(mesh, folder, max_steps=1, eval_strategy="steps")
    for odd.at in places:
        try:
            trainer.train()
        except Exception as error:
            found[odd.at] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize(("replicas", "places"), [(1, PLACES), *long((2, OF_REPLICAS))])
def test_what_one_rank_raises_all_raise(world, tmp_path, replicas, places):
    ranks = 2 * replicas
    *others, own = world(ranks).run(
        raised, ranks, str(tmp_path), places, replicate=replicas
    )
    assert own == {place: f"OSError: no paper at {place}" for place in places}
    told = {
        place: f"PeerMismatch: rank {ranks - 1} failed: {text}"
        for place, text in own.items()
    }
    assert others == [told] * (ranks - 1)


def asked(mesh: Any, folder: str) -> dict[str, Any]:
    """By what a callback of the last rank asks for, and where: what this rank's trainer does in two steps; and the
    first rank's metrics.
    """
    found: dict[str, Any] = {}
    trainer, odd = made(mesh, folder, logging_steps=2)
    for place, what in ASKED:
        odd.at, odd.sets, odd.done = place, f"should_{what}", []
        trainer.train()
        found[f"{what} at {place}"] = [*odd.done, f"step {trainer.state.global_step}"]
    return found | {"metrics": trainer.evaluate()["eval_of"]}


ASKED = [
    ("step_end", "evaluate"),
    ("step_begin", "epoch_stop"),
    ("substep_end", "training_stop"),
]
ASKED += [("log", "save"), ("epoch_end", "evaluate")]


@pytest.mark.long
def test_what_a_callback_of_one_rank_asks_for_all_do(world, tmp_path):
    expected = asked(None, str(tmp_path))
    assert (
        "save" in expected["save at log"]
        and "evaluate" in expected["evaluate at step_end"]
    )
    assert world(2).run(asked, 2, str(tmp_path)) == [expected] * 2


def timeouts(mesh: Any, folder: str) -> tuple[list[set[float]], float]:
    """Of all ranks' group and those of a mesh: what trainers set, and what it was before."""
    device, found = torch.device("cpu"), list[set[float]]()
    groups = [
        dist.group.WORLD,
        *mesh.get_all_groups(),
        mesh["ring", "tp"]._flatten().get_group(),
    ]
    for seconds in (77, before := timeout_seconds(groups[0], device)):
        plain(mesh, "llama", {}, folder, {"ddp_timeout": int(seconds)})
        found.append({timeout_seconds(group, device) for group in groups})
    return found, before


def test_every_group_waits_as_long_as_the_trainers_time_out(world, tmp_path):
    for found, before in world(4).run(timeouts, 4, str(tmp_path), tp=2):
        assert found == [{77}, {before}]
