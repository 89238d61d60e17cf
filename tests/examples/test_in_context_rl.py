"""examples/in_context_rl in short form: its sequences, its environments, and its training on two ranks."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.examples.imported import imported

SIZES = Namespace(steps=6, tasks=9, collected=7, tokens=300)


def test_trajectories_of_a_sequence_ascend_and_aim_at_the_best():
    agent, grid = imported("in_context_rl", "agent"), imported("in_context_rl", "grid")
    random = np.random.default_rng(0)
    data = agent.drawn_from(agent.collect(grid, grid.tasks(30, random), 9, random), 20, 5, random)
    returns = data["rewards"].sum(-1)
    assert (np.diff(returns) >= 0).all() and (returns[:, -1] > returns[:, 0]).any()
    to_go = agent.sequences(grid, agent.Kind(5), data)["features"][..., -3].view(20, 5, grid.STEPS) * grid.SCALE
    assert torch.equal(to_go[:, :, 0], torch.from_numpy(returns[:, -1:]).expand(-1, 5).float())
    spent = data["rewards"].cumsum(-1)[..., :-1]
    assert to_go[:, :, 1:].numpy() == pytest.approx(returns[:, -1:, None] - spent)


def test_an_agent_acts_on_the_tokens_that_it_was_trained_on(monkeypatch):
    """What is told attempt by attempt through the cache is the sequence of what happened."""
    agent, grid = imported("in_context_rl", "agent"), imported("in_context_rl", "grid")
    kind, random = agent.Kind(3), np.random.default_rng(0)
    tokens, steps = [], []

    class Rooms(grid.Rooms):
        def step(self, actions):
            before = self._seen()
            steps.append((before, actions, super().step(actions)))
            return steps[-1][2]

    monkeypatch.setattr(grid, "make", Rooms)
    acting = agent.make_agent(grid, kind, 0).eval()
    acting.register_forward_pre_hook(lambda _, given: tokens.append(given[0]))
    answers = []
    acting.register_forward_hook(lambda _, given, answer: answers.append(answer))
    agent.attempts(grid, acting, kind, grid.unseen(4, random), 3, random)
    shape = (4, 3, grid.STEPS)
    data = {
        "observed": np.stack([before for before, _, _ in steps], 1).reshape(*shape, -1),
        "actions": np.stack([actions for _, actions, _ in steps], 1).reshape(shape),
        "rewards": np.stack([rewards for _, _, (_, rewards) in steps], 1).reshape(shape),
    }
    made = agent.sequences(grid, kind, data, aim=grid.WANTED)["features"]
    assert torch.equal(torch.cat(tokens, 1), made)
    one_by_one = torch.cat(answers, 1)
    with torch.no_grad():
        whole = acting(made, torch.arange(made.shape[1])[None])
    torch.testing.assert_close(one_by_one, whole, rtol=1e-4, atol=1e-4)


def training(mesh: DeviceMesh) -> list[float]:
    compare, agent, grid = (imported("in_context_rl", name) for name in ("compare", "agent", "grid"))
    return compare.trained(grid, agent.Kind(5), 0, SIZES, mesh)[1]


def test_training_on_two_ranks_is_that_of_one(pool):
    alone = pool.run(training, 1)[0]
    for losses in pool.run(training, 2):
        assert losses == pytest.approx(alone, rel=1e-3)
    assert alone[-1] < alone[0]


def test_the_pendulum_is_that_of_gymnasium():
    """Rewards and observations of ``Pendulum-v1`` (gymnasium 1.4.0), each torque held for four steps."""
    pendulum = imported("in_context_rl", "pendulum")
    ours = pendulum.Pendulums(np.zeros(1), np.random.default_rng(0))
    ours.reset()
    ours.angle, ours.speed = np.array([2.5]), np.array([-1.5])
    expected = {
        0.7: (-24.7622, [-0.822618, 0.568595, 1.203638]),
        -1.0: (-28.6560, [-0.948328, 0.317292, 1.441180]),
        0.3: (-36.6138, [-0.995507, -0.094683, 2.328835]),
    }
    for torque, (reward, (cosine, sine, speed)) in expected.items():
        observed, rewards = ours.step(np.array([[torque]]))
        assert rewards == pytest.approx(reward, rel=1e-5)
        assert observed[0] == pytest.approx([cosine, sine, speed / pendulum.SPEED], rel=1e-4)
