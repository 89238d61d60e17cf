"""A dark room: a goal that nobody sees, and a reward for each step that is spent on it."""

from typing import Any, Final

import numpy as np

SIDE: Final = 7
STEPS: Final = 16
MOVES: Final = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
NUM_ACTIONS: Final = len(MOVES)
ACTIONS_ARE_INDICES: Final = True
NUM_OBSERVED: Final = 2 * SIDE
_OUTSIDE_CENTER: Final = [
    cell for cell in range(SIDE * SIDE) if cell != SIDE * SIDE // 2
]
UNSEEN: Final = tuple(cell for cell in _OUTSIDE_CENTER if cell % 4 == 1)
"""Goals of the evaluation; none of them is a goal in training."""
SEEN: Final = tuple(cell for cell in _OUTSIDE_CENTER if cell not in UNSEEN)
WANTED: Final = 12.0
"""The return that is asked for in the evaluation."""
SCALE: Final = 10.0


class Rooms:
    """Many rooms at once, of goals (B,); actions are indices (B,)."""

    def __init__(self, goals: Any, random: Any) -> None:
        self.goals = np.asarray(goals)

    def reset(self) -> np.ndarray:
        """Observations (B, NUM_OBSERVED): the row and the column, one-hot. Every trajectory begins in the center."""
        self.at = np.full((len(self.goals), 2), SIDE // 2)
        return self._seen()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Observations and rewards (B,)."""
        self.at = np.clip(self.at + MOVES[actions], 0, SIDE - 1)
        return self._seen(), (self.at @ (SIDE, 1) == self.goals).astype(np.float32)

    def _seen(self) -> np.ndarray:
        return np.eye(SIDE, dtype=np.float32)[self.at].reshape(
            len(self.at), NUM_OBSERVED
        )


class Explorer:
    """Walks to the cells that it visited least; in three trajectories of ten, to where it was rewarded before."""

    def __init__(self, count: int, random: Any) -> None:
        self.random, self.rows = random, np.arange(count)
        self.visits = np.zeros((count, SIDE * SIDE))
        self.rewarded = np.full(count, -1)

    def begin(self) -> None:
        """A new trajectory."""
        self.returns = self.random.random(len(self.rows)) < 0.3
        self.target = self._least_visited()

    def act(self, observed: np.ndarray) -> np.ndarray:
        """Actions (B,)."""
        at = observed.reshape(-1, 2, SIDE).argmax(-1)
        cell = at @ (SIDE, 1)
        self.visits[self.rows, cell] += 1
        self.target = np.where(cell == self.target, self._least_visited(), self.target)
        target = np.where(
            self.returns & (self.rewarded >= 0), self.rewarded, self.target
        )
        away = np.stack(np.divmod(target, SIDE), -1) - at
        axis = np.where(
            away[:, 0] == 0,
            1,
            np.where(away[:, 1] == 0, 0, self.random.integers(0, 2, len(at))),
        )
        backward = away[self.rows, axis] < 0
        return np.where((away == 0).all(-1), 0, 1 + 2 * axis + backward)

    def learn(self, observed: np.ndarray, rewards: np.ndarray) -> None:
        """What followed an action."""
        cell = observed.reshape(-1, 2, SIDE).argmax(-1) @ (SIDE, 1)
        self.rewarded = np.where(rewards > 0, cell, self.rewarded)

    def _least_visited(self) -> np.ndarray:
        return (self.visits + 0.9 * self.random.random(self.visits.shape)).argmin(1)


def tasks(count: int, random: Any) -> np.ndarray:
    """Goals to train on."""
    return random.choice(SEEN, count)


def unseen(count: int, random: Any) -> np.ndarray:
    """Goals to evaluate on."""
    return np.resize(UNSEEN, count)


make = Rooms


def collect(tasks: np.ndarray, trajectories: int, random: Any) -> dict[str, np.ndarray]:
    """Trajectories (B, E, T, ...) of an explorer in each room, in the order in which they were made."""
    environment, explorer = make(tasks, random), Explorer(len(tasks), random)
    seen, done, gained = [], [], []
    for _ in range(trajectories):
        observed = environment.reset()
        explorer.begin()
        for _ in range(STEPS):
            seen.append(observed)
            done.append(explorer.act(observed))
            observed, rewards = environment.step(done[-1])
            explorer.learn(observed, rewards)
            gained.append(rewards)
    return {
        name: np.stack(column, 1).reshape(
            len(tasks), trajectories, STEPS, *column[0].shape[1:]
        )
        for name, column in (("observed", seen), ("actions", done), ("rewards", gained))
    }
