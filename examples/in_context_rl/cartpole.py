"""dm_control's cart with a pole, ``swingup``, one of ExoRL's tasks in the paper; nothing of it is hidden."""

import sys
from functools import partial
from typing import Any, Final

import control
import numpy as np

TASK: Final = ("cartpole", "swingup")
STEPS: Final = 32
HELD: Final = 8
"""Steps of the suite, of 10 ms each, for which a force is held."""
NUM_ACTIONS: Final = 1
ACTIONS_ARE_INDICES: Final = False
NUM_OBSERVED: Final = 5
HIDDEN: Final = 8
NUM_NUMBERS: Final = HIDDEN * (NUM_OBSERVED + 2)
"""Of an exploring policy: the weights of a network of two layers."""
WANTED: Final = 14.0
"""The return that is asked for in the evaluation: that of the best trajectories in the data."""
SCALE: Final = 10.0


def observed(physics: Any) -> np.ndarray:
    """The place of the cart, the direction of the pole, and both speeds."""
    return np.concatenate([physics.bounded_position(), physics.velocity() / (3, 6)])


def outcome(body: Any) -> np.ndarray:
    """The suite's reward: upright, in the middle, with little force and speed."""
    return np.array(body.task.get_reward(body.physics))


def rewards(outcomes: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    """The outcomes themselves."""
    return outcomes


def tasks(count: int, random: Any) -> np.ndarray:
    """The one task."""
    return np.zeros(count)


def acted(policies: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """What the networks of policies (P, NUM_NUMBERS) say."""
    inner, outer = np.split(policies, [HIDDEN * (NUM_OBSERVED + 1)], 1)
    inputs = np.concatenate([observed, np.ones((len(observed), 1))], 1)
    hidden = np.tanh(
        1.5
        * np.einsum("phi,pi->ph", inner.reshape(-1, HIDDEN, NUM_OBSERVED + 1), inputs)
    )
    return np.tanh((outer * hidden).sum(1, keepdims=True))


unseen = tasks
make = partial(control.Bodies, sys.modules[__name__])
collect = partial(control.collect, sys.modules[__name__])
