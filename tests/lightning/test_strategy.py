"""Lightning's Trainer on a ring: losses, weights and checkpoints of one process."""

import inspect
import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning", reason="needs ringspan[lightning]")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.environments import ClusterEnvironment
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader

import ringspan as rs
from ringspan.checkpoints import folder as folders
from ringspan.core.errors import UnsupportedError
from ringspan.lightning import RingStrategy, strategy
from ringspan.proof.before import prove_before
from tests.cases import long
from tests.torch.models import build, relative, tokens

IDS = tokens(8, 21)
ROWS = [
    {"input_ids": ids, "labels": torch.where(torch.arange(21) < 4 + n, ids, -100)}
    for n, ids in enumerate(IDS)
]
STEPS = 2  # of an epoch, with four rows each
EVALUATION = [{"input_ids": row, "labels": row} for row in tokens(4, 21, seed=5)]
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "num_sanity_val_steps": 0, "max_epochs": 2, "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
}  # fmt: skip


class Ranks(ClusterEnvironment):
    """The ranks of the pool, which are there already."""

    creates_processes_externally = True
    main_address, main_port = "localhost", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Module(LightningModule):
    """A model of transformers; on a ring where the strategy has one."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = build("llama")
        self.is_on_ring = False
        self.lr = 1e-2
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None and not self.is_on_ring:
            self.model, self.is_on_ring = (
                rs.parallelize(self.model, self.device_mesh),
                True,
            )

    def loss(self, batch: Any) -> torch.Tensor:
        return self.model(
            **(
                batch
                if self.device_mesh is None
                else rs.shard_batch(batch, self.device_mesh)
            )
        ).loss

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.evaluated.append(float(self.loss(batch)))

    def configure_optimizers(self) -> Any:
        # at 1e-8 Adam steps on rounding
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 / (1 + step)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class SaveAt(Callback):
    def __init__(self, epoch: int, path: str) -> None:
        self.epoch, self.path = epoch, path

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


class WithLoader(Module):
    """One whose loader is the ring's own."""

    def train_dataloader(self) -> Any:
        return rs.loader(ROWS, self.device_mesh, batch_size=2)  # type: ignore[arg-type]


def fit(
    options: dict[str, Any],
    batch_size: int,
    resume: str | None = None,
    kind: type[Module] = Module,
    shuffle: bool = False,
) -> dict[str, Any]:
    torch.manual_seed(0)
    module = kind()
    trainer = Trainer(**QUIET, **options)
    train: Any = (
        None if kind is WithLoader else DataLoader(ROWS, batch_size, shuffle=shuffle)
    )
    trainer.fit(module, train, DataLoader(EVALUATION, batch_size), ckpt_path=resume)  # type: ignore[arg-type]
    logged = float(trainer.callback_metrics["loss"])
    trainer.validate(module, DataLoader(EVALUATION, batch_size), verbose=False)  # type: ignore[arg-type]
    weights = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p
        for name, p in module.model.named_parameters()
    }
    return {
        "losses": module.losses,
        "evaluated": module.evaluated,
        "weights": {name: weight.detach() for name, weight in weights.items()},
        "logged": logged,
    }


def ring_fit(
    mesh: Any, sizes: dict[str, Any], batch_size: int, save: str | None = None, resume: str | None = None,
    callbacks: list[Callback] | None = None, **changes: Any,
) -> Any:  # fmt: skip
    callbacks = [SaveAt(0, save)] if save else callbacks or []
    options = {
        "devices": 4,
        "strategy": RingStrategy(**sizes),
        "plugins": [Ranks()],
        "callbacks": callbacks,
    }
    return fit(options, batch_size, resume, **changes)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return fit({"devices": 1}, 4)


def test_a_fit_equals_one_process(pool, expected):
    for found in pool.run(ring_fit, 4, {"ring": 2, "tp": 2}, 4):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
        assert found["logged"] == pytest.approx(expected["logged"], rel=1e-5)
        for name, weight in expected["weights"].items():
            assert relative(found["weights"][name], weight) < 1e-5, name


def proven_fit(mesh: Any) -> tuple[Any, list[str]]:
    """A fit that is proven first, and the models that were."""
    proven: list[str] = []

    def noted(*args: Any) -> Any:
        proof = prove_before(*args)
        proven.append(f"{proof.model} {proof.is_exact} {proof.options}")
        return proof

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "prove_before", noted)
        return ring_fit(mesh, {"ring": 4, "prove": True}, 4), proven


@pytest.mark.long
def test_a_fit_is_proven_once_before_its_first_step(pool, expected):
    for found, proven in pool.run(proven_fit, 4):
        assert proven == ["LlamaForCausalLM True {}"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.long
def test_a_loader_of_the_ring_is_taken_as_it_is(pool, expected):
    for found in pool.run(partial(ring_fit, kind=WithLoader), 4, {"replicate": 2}, 2):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.long
def test_a_shuffling_loader_gives_every_mesh_the_same_batches(pool, expected):
    two = pool.run(partial(ring_fit, shuffle=True), 4, {"replicate": 2}, 2)[0]["losses"]
    one = pool.run(partial(ring_fit, shuffle=True), 4, {"ring": 4}, 4)[0]["losses"]
    assert one == pytest.approx(two, rel=1e-5)
    assert one[0] != pytest.approx(expected["losses"][0], rel=1e-5)
    assert one[:STEPS] != pytest.approx(one[STEPS:], rel=1e-2), (
        "another order in each epoch"
    )


@pytest.mark.parametrize("is_folder", [True, *long(False)])
def test_a_checkpoint_resumes_on_another_mesh(pool, expected, tmp_path, is_folder):
    path, sizes = str(tmp_path / "saved"), {"save_distributed_checkpoint": is_folder}
    pool.run(ring_fit, 4, {"replicate": 2} | sizes, 2, path)
    assert Path(path).is_dir() == is_folder
    for found in pool.run(ring_fit, 4, {"ring": 4} | sizes, 4, None, path):
        assert found["losses"] == pytest.approx(expected["losses"][STEPS:], rel=1e-5)
        for name, weight in expected["weights"].items():
            assert relative(found["weights"][name], weight) < 1e-5, name


def saving_fit(mesh: Any, folder: str, *, is_folder: bool, async_save: bool) -> Any:
    """A fit that keeps the checkpoint of its last step, and what there is on the disk while it is written."""
    commit, seen = folders._commit, list[list[str]]()

    def noted(scratch: Path, target: Path) -> None:
        seen.append(sorted(path.name for path in Path(folder).iterdir()))
        commit(scratch, target)

    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1)
    sizes = {"save_distributed_checkpoint": is_folder, "async_save": async_save}
    changes = {"ring": 4, **sizes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(QUIET, "enable_checkpointing", True)
        patch.setattr(folders, "_commit", noted)
        found = ring_fit(mesh, changes, 4, callbacks=[keep])
    return found, seen, Path(keep.best_model_path).name


@pytest.mark.long
@pytest.mark.parametrize("is_folder", [True, False])
def test_checkpoints_beside_steps_are_those_of_a_fit_that_waits(
    pool, expected, tmp_path, is_folder
):
    folder = tmp_path / "beside"
    run = partial(saving_fit, is_folder=is_folder, async_save=True)
    for found, seen, best in pool.run(run, 4, str(folder)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert best == "step=2.ckpt"
        # The first is there until the second is.
        assert seen in (
            [],
            [
                ["ringspan-saving-step=1.ckpt"],
                ["ringspan-saving-step=2.ckpt", "step=1.ckpt"],
            ],
        )
    assert [path.name for path in folder.iterdir()] == ["step=2.ckpt"]
    file = folder / "step=2.ckpt"
    if is_folder:
        dcp_to_torch_save(file, tmp_path / "one")
        file = tmp_path / "one"
    state = torch.load(file, weights_only=False)["state_dict"]
    for name, weight in expected["weights"].items():
        assert relative(state[f"model.{name}"], weight) < 1e-5, name


def test_a_link_to_a_checkpoint_that_is_not_written_is_refused():
    trainer = SimpleNamespace(callbacks=[ModelCheckpoint(save_last="link")])
    with pytest.raises(UnsupportedError, match="use save_last=True"):
        strategy._refuse_callbacks(trainer, async_save=True)
    strategy._refuse_callbacks(trainer, async_save=False)


class OddModule(Module):
    """In whose third step the last rank wants to stop, or raises, alone."""

    def on_train_start(self) -> None:
        self.odd = self.trainer.strategy.is_raising if dist.get_rank() == 3 else None  # type: ignore[attr-defined]

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = super().training_step(batch)
        if len(self.losses) == 3 and self.odd is not None:
            if self.odd:
                raise OSError("out of paper")
            self.trainer.should_stop = True
        return loss


class OddHook(Callback):
    """Which raises on the last rank, in the third step; all ranks save then."""

    def __init__(self, name: str) -> None:
        def raise_once(trainer: Trainer, module: Any, *_: Any) -> None:
            if dist.get_rank() == 3 and len(module.losses) == 3:
                raise OSError("out of paper")

        setattr(self, name, raise_once)


def fit_with_an_odd_rank(
    _: Any, is_raising: bool, hook: str = "", folder: str = ""
) -> tuple[str, int]:
    """What comes of it, and the number of steps."""
    strategy, module = RingStrategy(replicate=2), Module() if hook else OddModule()
    strategy.is_raising = is_raising  # type: ignore[attr-defined]
    callbacks: Any = (
        [OddHook(hook), ModelCheckpoint(folder, save_on_exception=True)] if hook else []
    )
    quiet = QUIET | {
        "enable_checkpointing": bool(hook),
        "accumulate_grad_batches": 1,
        "callbacks": callbacks,
    }
    trainer = Trainer(**quiet, devices=4, strategy=strategy, plugins=[Ranks()])
    try:
        trainer.fit(module, DataLoader(2 * ROWS, 2))  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}", len(module.losses)
    return "", len(module.losses)


def test_what_one_rank_raises_or_asks_for_all_do(pool):
    told = "PeerMismatch: rank 3 failed: OSError: out of paper"
    assert pool.run(fit_with_an_odd_rank, 4, True) == [(told, 3)] * 3 + [
        ("OSError: out of paper", 3)
    ]
    assert pool.run(fit_with_an_odd_rank, 4, False) == [("", 3)] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    "hook",
    ["on_after_backward", "on_before_backward", "on_before_optimizer_step"],
)
def test_what_a_callback_of_one_rank_raises_all_raise_and_save(pool, tmp_path, hook):
    told = "PeerMismatch: rank 3 failed: OSError: out of paper"
    expected = [(told, 3)] * 3 + [("OSError: out of paper", 3)]
    assert pool.run(fit_with_an_odd_rank, 4, True, hook, str(tmp_path)) == expected
    (saved,) = tmp_path.iterdir()
    assert (saved / ".metadata").exists()


class NotOnRing(Module):
    def configure_model(self) -> None:
        pass


def refused(
    mesh: Any, sizes: dict[str, Any], kind: Any, precision: Any, callback: Any
) -> str:
    options = {
        "strategy": RingStrategy(**sizes),
        "precision": precision,
        "callbacks": callback(),
    }
    trainer = Trainer(**QUIET, devices=4, plugins=[Ranks()], **options)
    with pytest.raises(rs.RingspanError) as caught:
        trainer.fit(kind(), DataLoader(ROWS, 2))  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "kind", "precision", "callback", "message"),
    [
        (
            {"ring": 3},
            Module,
            32,
            list,
            "replicate 1 x ring 3 must equal the world size 4",
        ),
        (
            {},
            Module,
            "bf16-true",
            list,
            "precision='bf16-true' converts weights that are split already",
        ),
        (
            {},
            NotOnRing,
            32,
            list,
            "there is no model on the ring in this module; put it there in configure_model",
        ),
        (
            {},
            Module,
            32,
            partial(StochasticWeightAveraging, 0.1),
            "StochasticWeightAveraging copies whole weights",
        ),
        (
            {},
            Module,
            32,
            EMAWeightAveraging,
            "EMAWeightAveraging copies whole weights, which are split on a ring",
        ),
        (
            {},
            Module,
            32,
            partial(ModelPruning, "l1_unstructured"),
            "ModelPruning prunes whole weights, which are split",
        ),
    ],
)
def test_what_would_not_be_exact_is_refused(
    pool, sizes, kind, precision, callback, message
):
    for said in pool.run(refused, 4, sizes, kind, precision, callback):
        assert message in said and "\n" not in said


class Predicting(Module):
    def predict_step(self, batch: Any) -> int:
        return len(batch["input_ids"])


def predicted(mesh: Any, examples: int, batch_size: int, limit: float = 1.0) -> Any:
    own = {"strategy": RingStrategy(replicate=2), "limit_predict_batches": limit}
    trainer = Trainer(**QUIET, **own, devices=4, plugins=[Ranks()])
    return trainer.predict(Predicting(), DataLoader(ROWS[:examples], batch_size))  # type: ignore[arg-type]


def test_predictions_that_replicas_would_split_are_refused(pool):
    for outcome in pool.outcomes(predicted, 4, 5, 1):
        assert isinstance(outcome, rs.UnsupportedError), outcome
        assert str(outcome).startswith(
            "predict: 5 examples in batches of 1 do not come out even on 2 replicas"
        )
        assert (
            "give 4 or 6 examples, or limit_predict_batches=2, or use RingStrategy(replicate=1)"
            in str(outcome)
        )
    # on a replica without examples Lightning's sampler has raised
    first, *_ = pool.outcomes(predicted, 4, 1, 1)
    assert "give 2 examples, or use" in str(first)
    assert pool.run(predicted, 4, 7, 2) == [[2, 2], [2, 2], [2, 1], [2, 1]]


def test_predictions_are_counted_up_to_their_limit(pool):
    # one of two batches, two of three
    assert pool.run(predicted, 4, 5, 1, 2) == [[1, 1]] * 4
    for outcome in pool.outcomes(predicted, 4, 5, 1, 0.67):
        assert isinstance(outcome, rs.UnsupportedError), outcome
    assert pool.run(predicted, 4, 5, 1, 0.5) == [[1]] * 4


def test_there_is_no_mesh_before_the_trainer_starts():
    with pytest.raises(rs.ConfigError, match="there is none before the trainer starts"):
        _ = RingStrategy(ring=2).device_mesh


SEAMS = tomllib.loads(Path(__file__).with_name("seams.toml").read_text())


@pytest.mark.parametrize(("place", "texts"), SEAMS.items())
def test_the_installed_release_has_every_seam(place, texts):
    module, _, name = place.partition(":")
    source = inspect.getsource(getattr(import_module(module), name))
    for text in texts:
        assert text in source, f"{place}: {text}"
