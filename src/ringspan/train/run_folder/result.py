"""The result of a run, in its own module: the launcher imports it after the last step, and nothing slow with it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainResult:
    """The result of a finished run: its folder, last losses and origin."""

    run: str
    model: str
    steps: int
    loss: float
    eval_loss: float | None
    facts: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None
    """The signal that ended the run early; starting it again resumes it."""
