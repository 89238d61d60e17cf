"""Gymnasium's Pendulum-v1, many at once: swing up with less torque than it takes, and hold; a cost at each step.

A decision is held for four of the environment's steps, so a trajectory has 50.
"""

from typing import Any, Final

import numpy as np

STEPS: Final = 50
HELD: Final = 4
NUM_ACTIONS: Final = 1
NUM_OBSERVED: Final = 3
WANTED: Final = -150.0
"""The return that is asked for in the evaluation; the best trajectories of the data come near it."""
SCALE: Final = 500.0
GRAVITY, SECONDS, TORQUE, SPEED = 10.0, 0.05, 2.0, 8.0


class Pendulums:
    """Many pendulums; actions are torques (B, 1) as shares of the largest, from -1 to 1."""

    def __init__(self, tasks: Any, random: Any) -> None:
        self.count, self.random = len(tasks), random

    def reset(self) -> np.ndarray:
        """Observations (B, 3): cosine, sine and a share of the largest speed."""
        self.angle = self.random.uniform(-np.pi, np.pi, self.count)
        self.speed = self.random.uniform(-1, 1, self.count)
        return self._seen()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Observations and rewards (B,)."""
        torque, rewards = TORQUE * np.clip(actions[:, 0], -1, 1), np.zeros(self.count)
        for _ in range(HELD):
            away = (self.angle + np.pi) % (2 * np.pi) - np.pi
            rewards -= away**2 + 0.1 * self.speed**2 + 0.001 * torque**2
            pull = 1.5 * GRAVITY * np.sin(self.angle) + 3 * torque
            self.speed = np.clip(self.speed + pull * SECONDS, -SPEED, SPEED)
            self.angle = self.angle + self.speed * SECONDS
        return self._seen(), rewards.astype(np.float32)

    def _seen(self) -> np.ndarray:
        return np.stack([np.cos(self.angle), np.sin(self.angle), self.speed / SPEED], -1).astype(np.float32)


class Explorer:
    """A random policy for each trajectory, and torques beside it that change slowly; it looks at no reward."""

    def __init__(self, count: int, random: Any) -> None:
        self.count, self.random = count, random

    def begin(self) -> None:
        """A new trajectory."""
        self.weights = self.random.normal(0, 2.0, (self.count, NUM_OBSERVED + 1))
        self.noise = np.zeros(self.count)
        self.spread = self.random.uniform(0.1, 0.7, self.count)

    def act(self, observed: np.ndarray) -> np.ndarray:
        """Actions (B, 1)."""
        self.noise = 0.8 * self.noise + 0.6 * self.spread * self.random.normal(size=len(self.noise))
        cosine, sine, speed = observed.T
        seen = np.stack([sine, speed * 4, cosine * speed * 4, np.sign(speed)], -1)
        return np.clip((seen * self.weights).sum(-1) + self.noise, -1, 1)[:, None].astype(np.float32)

    def learn(self, observed: np.ndarray, rewards: np.ndarray) -> None:
        """What followed an action; nothing is learnt from it."""


def tasks(count: int, random: Any) -> np.ndarray:
    """The one task."""
    return np.zeros(count, dtype=int)


unseen = tasks
make = Pendulums
