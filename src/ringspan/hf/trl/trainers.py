"""TRL's trainers on a ring."""

# pyright: reportPrivateImportUsage=false
from trl import (
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    RewardTrainer,
    RLOOTrainer,
    SFTTrainer,
)

from ringspan.hf.trainer import RingTrainerMixin


class RingSFTTrainer(RingTrainerMixin, SFTTrainer):
    """TRL's ``SFTTrainer`` on a ring: packed documents stay apart."""


class RingDPOTrainer(RingTrainerMixin, DPOTrainer):
    """TRL's ``DPOTrainer`` on a ring, the reference model on the same one."""


class RingKTOTrainer(RingTrainerMixin, KTOTrainer):
    """TRL's ``KTOTrainer`` on a ring, the reference model on the same one."""


class RingRewardTrainer(RingTrainerMixin, RewardTrainer):
    """TRL's ``RewardTrainer`` on a ring: a sequence's score is that of its last token, on any rank."""


class RingGRPOTrainer(RingTrainerMixin, GRPOTrainer):
    """TRL's ``GRPOTrainer`` on a ring, which also generates the completions."""


class RingRLOOTrainer(RingTrainerMixin, RLOOTrainer):
    """TRL's ``RLOOTrainer`` on a ring, which also generates the completions."""
