"""TRL's trainers on a ring."""

from trl import SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from ringspan.hf.trainer import RingTrainerMixin


class RingSFTTrainer(RingTrainerMixin, SFTTrainer):
    """TRL's ``SFTTrainer`` on a ring: packed documents stay apart."""
