"""dm_control's point mass, with a goal that it does not see, anywhere in its arena.

As in ExoRL's tasks of reaching a place; without their walls. Exploring policies go to a place each, and stay there.
"""

import sys
from functools import partial
from typing import Any, Final

import control
import numpy as np
from dm_control.utils import rewards as shapes

TASK: Final = ("point_mass", "easy")
STEPS: Final = 8
HELD: Final = 36
"""Steps of the suite, of 20 ms each, for which an action is held."""
NUM_ACTIONS: Final = 2
ACTIONS_ARE_INDICES: Final = False
NUM_OBSERVED: Final = 4
NUM_NUMBERS: Final = 2
"""Of an exploring policy: its place."""
WANTED: Final = 6.0
"""The return that is asked for in the evaluation."""
SCALE: Final = 4.0
SIZE: Final = 0.08
"""Of the goal, in an arena from -0.3 to 0.3."""


def observed(physics: Any) -> np.ndarray:
    """Position and velocity."""
    return np.concatenate([physics.data.qpos / 0.3, physics.data.qvel / 0.1])


def outcome(body: Any) -> np.ndarray:
    """Position and action (4,)."""
    return np.concatenate([body.physics.data.qpos, body.physics.data.ctrl])


def rewards(outcomes: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    """The suite's (B, T), for outcomes (B, T, 4) and goals (B, 2): near the goal, with little force."""
    away = np.linalg.norm(outcomes[..., :2] - tasks[:, None], axis=-1)
    force = shapes.tolerance(
        outcomes[..., 2:], margin=1, value_at_margin=0, sigmoid="quadratic"
    ).mean(-1)
    return shapes.tolerance(away, (0, SIZE), margin=SIZE) * (force + 4) / 5


def tasks(count: int, random: Any) -> np.ndarray:
    """Goals (count, 2)."""
    return random.uniform(-0.25, 0.25, (count, 2))


def acted(policies: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Towards the places of policies (P, 2)."""
    return 4 * (np.tanh(policies) - observed[:, :2]) - 0.5 * observed[:, 2:]


unseen = tasks
make = partial(control.Bodies, sys.modules[__name__])
collect = partial(control.collect, sys.modules[__name__])
