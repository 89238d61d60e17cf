"""Trainers of transformers and TRL with sequences split over a ring: one changed line. Needs ``ringspan[hf]``.

class Trainer(RingTrainerMixin, trl.SFTTrainer): ...

trainer = Trainer(model=model, args=SFTConfig(...), train_dataset=data, ring=RingConfig(ring=4))
"""

# ruff: noqa: E402 - asked for before the modules below import it
from importlib import import_module
from typing import TYPE_CHECKING

from ringspan.core.messages.extras import require

require("ringspan.hf", "accelerate", "datasets")

from ringspan.hf.config import RingConfig
from ringspan.hf.loop import ring_accelerator
from ringspan.hf.trainer import RingTrainer, RingTrainerMixin

if TYPE_CHECKING:
    from ringspan.hf.trl.orpo import RingORPOTrainer
    from ringspan.hf.trl.trainers import (
        RingDPOTrainer,
        RingGRPOTrainer,
        RingKTOTrainer,
        RingRewardTrainer,
        RingRLOOTrainer,
        RingSFTTrainer,
    )

# Imported on first use, since TRL may be missing.
_TRL = frozenset(
    f"Ring{name}Trainer" for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")
)


def __getattr__(name: str) -> object:
    if name in _TRL or name == "RingORPOTrainer":
        require(f"ringspan.hf.{name}", "trl")
        return getattr(
            import_module(f"ringspan.hf.trl.{'trainers' if name in _TRL else 'orpo'}"),
            name,
        )
    raise AttributeError(f"module 'ringspan.hf' has no attribute {name!r}")


__all__ = [
    "RingConfig", "RingDPOTrainer", "RingGRPOTrainer", "RingKTOTrainer", "RingORPOTrainer", "RingRLOOTrainer",
    "RingRewardTrainer", "RingSFTTrainer", "RingTrainer", "RingTrainerMixin", "ring_accelerator",
]  # fmt: skip
