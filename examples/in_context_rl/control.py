"""Control of dm_control's bodies, as in ExoRL (Yarats et al. 2022): explored without rewards, then relabelled by tasks.

A world that uses it names a domain and task of the suite, what is observed, and how a state is rewarded. No display is
needed. ``pip install dm_control 'mujoco<4'``
"""

import os
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

try:
    os.environ.setdefault("MUJOCO_GL", "disable")  # states are observed, no pictures
    from dm_control import suite
except ImportError as missing:
    raise SystemExit(
        "this world is one of dm_control: pip install dm_control 'mujoco<4'"
    ) from missing

EXPLORED: Final = 512
"""Trajectories of an exploration."""
POLICIES: Final = 64
"""Explore side by side."""


class Bodies:
    """One body of the suite for each task (B, ...), all moved at once; actions (B, A) are shares of the strongest."""

    def __init__(self, world: ModuleType, tasks: np.ndarray, random: Any) -> None:
        self.world, self.tasks = world, tasks
        seeds = random.integers(2**31, size=len(tasks))
        self.made = [
            suite.load(*world.TASK, task_kwargs={"random": int(seed)}) for seed in seeds
        ]

    def reset(self) -> np.ndarray:
        """Observations (B, NUM_OBSERVED), where the suite lets an episode begin."""
        for body in self.made:
            body.reset()
        return self._seen()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Observations and rewards (B,) after an action was held."""
        for body, action in zip(self.made, np.clip(actions, -1, 1), strict=True):
            body.physics.data.ctrl[:] = action
            body.physics.step(self.world.HELD)
        return self._seen(), self.world.rewards(self.outcomes()[:, None], self.tasks)[
            :, 0
        ].astype(np.float32)

    def outcomes(self) -> np.ndarray:
        """What rewards depend on (B, ...)."""
        return np.stack([self.world.outcome(body) for body in self.made])

    def _seen(self) -> np.ndarray:
        return np.stack(
            [self.world.observed(body.physics) for body in self.made]
        ).astype(np.float32)


class Novelty:
    """Random network distillation (Burda et al. 2019): new is where a trained network misses a random one."""

    def __init__(self, num_observed: int, random: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(int(random.integers(2**31)))
            self.aim, self.learner = (
                nn.Sequential(nn.Linear(num_observed, 64), nn.ReLU(), nn.Linear(64, 32))
                for _ in range(2)
            )
        self.optimizer = torch.optim.Adam(self.learner.parameters(), lr=1e-3)

    def of(self, observed: np.ndarray) -> np.ndarray:
        """The error at each observation (...); the learner learns from it."""
        seen = torch.from_numpy(observed)
        wrong = (self.learner(seen) - self.aim(seen).detach()).square().mean(-1)
        for _ in range(4):
            self.optimizer.zero_grad()
            (self.learner(seen) - self.aim(seen).detach()).square().mean().backward()
            self.optimizer.step()
        return wrong.detach().numpy()


def explore(world: ModuleType, count: int, random: Any) -> dict[str, np.ndarray]:
    """Trajectories (count, T, ...) of policies that look for what is new to them, and at no reward.

    The bonus is ExoRL's; here policies (P, D), numbers that a world reads, evolve: half of each generation are new, and
    half changed copies of those that saw the newest. ExoRL trains one policy by DDPG for a million steps.
    """
    bodies, novelty = (
        Bodies(world, world.tasks(POLICIES, random), random),
        Novelty(world.NUM_OBSERVED, random),
    )
    policies, half = random.normal(size=(POLICIES, world.NUM_NUMBERS)), POLICIES // 2
    made = []
    for _ in range(-(-count // POLICIES)):
        made.append(rollouts(world, bodies, policies, random))
        newest = novelty.of(made[-1]["observed"]).mean(1).argsort()[-half // 2 :]
        policies[:half] = policies[random.choice(newest, half)] + 0.3 * random.normal(
            size=policies[half:].shape
        )
        policies[half:] = random.normal(size=policies[half:].shape)
    return {
        name: np.concatenate([one[name] for one in made])[:count] for name in made[0]
    }


def rollouts(
    world: ModuleType, bodies: Bodies, policies: np.ndarray, random: Any
) -> dict[str, np.ndarray]:
    """A trajectory (P, T, ...) of each policy, with noise that changes slowly on what it does."""
    observed, noise = bodies.reset(), np.zeros((len(policies), world.NUM_ACTIONS))
    spread = random.uniform(0.0, 0.2, (len(policies), 1))
    seen, done, came = [], [], []
    for _ in range(world.STEPS):
        noise = 0.8 * noise + 0.6 * spread * random.normal(size=noise.shape)
        seen.append(observed)
        done.append(
            np.clip(world.acted(policies, observed) + noise, -1, 1).astype(np.float32)
        )
        observed, _ = bodies.step(done[-1])
        came.append(bodies.outcomes())
    return {
        name: np.stack(column, 1)
        for name, column in (("observed", seen), ("actions", done), ("outcomes", came))
    }


def collect(
    world: ModuleType, tasks: np.ndarray, trajectories: int, random: Any
) -> dict[str, np.ndarray]:
    """Some trajectories of one exploration for each task (B, E, T, ...), with the rewards that they have in it.

    Most earn nothing for most tasks, so each is drawn in proportion to 1 and its return.
    """
    pool = explore(world, EXPLORED, random)
    everything = np.broadcast_to(
        pool["outcomes"], (len(tasks), *pool["outcomes"].shape)
    )
    flat = everything.reshape(len(tasks), -1, *everything.shape[3:])
    rewards = (
        world.rewards(flat, tasks).reshape(everything.shape[:3]).astype(np.float32)
    )
    # Efraimidis and Spirakis (2006)
    keys = random.random(rewards.shape[:2]) ** (1 / (1 + rewards.sum(-1)))
    chosen = keys.argsort(1)[:, -trajectories:]
    return {
        "observed": pool["observed"][chosen],
        "actions": pool["actions"][chosen],
        "rewards": np.take_along_axis(rewards, chosen[..., None], 1),
    }
