"""Lightning's Trainer with sequences split over a ring. Needs ``ringspan[lightning]``.

trainer = Trainer(strategy=RingStrategy(ring=4, replicate=2), devices=8)
"""

# ruff: noqa: E402 - asked for before the module below imports it
from ringspan.core.messages.extras import require

require("ringspan.lightning", "lightning")

from ringspan.lightning.strategy import RingStrategy

__all__ = ["RingStrategy"]
