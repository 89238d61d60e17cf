"""The private names of other libraries that trainers on a ring rely on: one that a release moves is named here."""

import inspect

import pytest
from accelerate import Accelerator
from transformers import Trainer
from trl import SFTTrainer  # pyright: ignore[reportPrivateImportUsage] - TRL's seams are looked at too

from ringspan.core.errors import UnsupportedError
from ringspan.hf import RingSFTTrainer, RingTrainer, RingTrainerMixin, seams


def test_the_installed_releases_have_every_seam():
    assert seams.moved() == []


def test_trainer_calls_what_is_overridden():
    for name in seams.OVERRIDDEN["transformers:Trainer"]:
        assert f"self.{name}(" in inspect.getsource(Trainer), (
            f"Trainer no longer calls {name}"
        )
        ours = vars(seams.OwnParts) | vars(seams.TrainerSeams)
        assert name in ours, f"{name} is not overridden"


def test_ours_are_right_in_front_of_trainer():
    class Users(RingSFTTrainer):
        """A user's."""

    class Mixed(Users, SFTTrainer):
        """Another one, from both sides."""

    class Extra:
        def save_state(self) -> None: ...

    class Behind(RingTrainerMixin, SFTTrainer, Extra):
        """What is behind a trainer stays there."""

    class BehindTrainer(RingTrainerMixin, Trainer, Extra):
        """So it does behind Trainer itself."""

    assert all(
        kind.save_state is Trainer.save_state for kind in (Behind, BehindTrainer)
    )
    for kind in (RingTrainer, RingSFTTrainer, Users, Mixed, Behind, BehindTrainer):
        order = kind.__mro__
        assert order.index(seams.OwnParts) + 1 == order.index(Trainer), kind
    assert seams.OwnParts not in SFTTrainer.__mro__ + RingTrainerMixin.__mro__


def test_a_seam_that_moved_is_named(monkeypatch):
    known = dict(seams.OVERRIDDEN["transformers:Trainer"]) | {
        "_save": ["folder"],
        "_gone": [],
    }
    monkeypatch.setitem(seams.OVERRIDDEN, "transformers:Trainer", known)
    monkeypatch.setitem(
        seams.SOURCE, "accelerate:Accelerator", ("self._all_models = []",)
    )
    expected = ["transformers:Trainer._save", "transformers:Trainer._gone"]
    assert seams.moved()[:3] == [
        *expected,
        "accelerate:Accelerator: self._all_models = []",
    ]
    with pytest.raises(
        UnsupportedError,
        match=r"transformers:Trainer\._save is not as ringspan knows it in transformers",
    ):
        RingTrainerMixin()


def test_what_a_release_has_not_yet_is_named(monkeypatch):
    """TRL before 1.15 has no fused head."""
    monkeypatch.delattr("trl.trainer.utils.add_fused_lm_head")
    with pytest.raises(
        UnsupportedError,
        match=r"trl.trainer.utils:add_fused_lm_head is not as .*, trl [0-9.]+; inst",
    ):
        RingTrainerMixin()


def test_what_is_public_is_overridden_in_public():
    private = {
        name
        for name in vars(RingTrainerMixin)
        if name.startswith("_") and not name.startswith("__")
    }
    assert private == {"_put_on_ring"}, (
        "a private method of Trainer belongs into seams.py"
    )
    assert not hasattr(Trainer, "_put_on_ring") and not hasattr(
        Accelerator, "ring_mesh"
    )
