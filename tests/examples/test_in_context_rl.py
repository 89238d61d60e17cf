"""examples/in_context_rl in short form: its sequences, its environments, and its training on two ranks."""

import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.cases import long
from tests.examples.imported import imported

SIZES = Namespace(
    world="grid", steps=6, tasks=9, collected=7, tokens=300, heads=4, memory_mb=None
)
NUMBERS = SimpleNamespace(
    STEPS=9, NUM_ACTIONS=2, NUM_OBSERVED=3, ACTIONS_ARE_INDICES=False, SCALE=2.0
)
"""A world whose actions are numbers."""


def test_trajectories_of_a_sequence_ascend_and_aim_at_the_best():
    agent, grid = imported("in_context_rl", "agent"), imported("in_context_rl", "grid")
    random = np.random.default_rng(0)
    data = agent.drawn_from(
        grid.collect(grid.tasks(30, random), 9, random), 20, 5, random
    )
    returns = data["rewards"].sum(-1)
    assert (np.diff(returns) >= 0).all() and (returns[:, -1] > returns[:, 0]).any()
    to_go = (
        agent.sequences(grid, agent.Kind(5), data)["features"][..., -3].view(
            20, 5, grid.STEPS
        )
        * grid.SCALE
    )
    assert torch.equal(
        to_go[:, :, 0], torch.from_numpy(returns[:, -1:]).expand(-1, 5).float()
    )
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
        "rewards": np.stack([rewards for _, _, (_, rewards) in steps], 1).reshape(
            shape
        ),
    }
    made = agent.sequences(grid, kind, data, aim=grid.WANTED)["features"]
    assert torch.equal(torch.cat(tokens, 1), made)
    one_by_one = torch.cat(answers, 1)
    with torch.no_grad():
        whole = acting(made, torch.arange(made.shape[1])[None])
    torch.testing.assert_close(one_by_one, whole, rtol=1e-4, atol=1e-4)


def training(mesh: DeviceMesh, are_indices: bool) -> list[float]:
    compare, agent, grid = (
        imported("in_context_rl", name) for name in ("compare", "agent", "grid")
    )
    if are_indices:
        data, random = compare.collected(0, SIZES)
        return compare.trained(grid, agent.Kind(5), 0, data, random, SIZES, mesh)[1]
    random, shape = (
        np.random.default_rng(0),
        (SIZES.tasks, SIZES.collected, NUMBERS.STEPS),
    )
    seen = random.normal(size=(*shape, NUMBERS.NUM_OBSERVED))
    data = {
        "observed": seen,
        "actions": np.tanh(seen[..., 1:]).astype("f"),
        "rewards": random.random(shape),
    }
    return compare.trained(NUMBERS, agent.Kind(5), 0, data, random, SIZES, mesh)[1]


@pytest.mark.parametrize("are_indices", [True, *long(False)])
def test_training_on_two_ranks_is_that_of_one(pool, are_indices):
    alone = pool.run(training, 1, are_indices)[0]
    for losses in pool.run(training, 2, are_indices):
        assert losses == pytest.approx(alone, rel=1e-3)
    assert alone[-1] < alone[0]


def test_numbers_are_drawn_from_the_mixture_that_the_loss_is_of():
    agent = imported("in_context_rl", "agent")
    torch.manual_seed(0)
    answer = 0.3 * torch.randn(1, agent.MIXED * 5) - 1.0
    drawn = agent.drawn(answer.expand(20_000, -1), NUMBERS, np.random.default_rng(0))
    given = agent.policy(NUMBERS, answer)
    inside = (np.abs(drawn) < 1).all(1)
    assert inside.mean() > 0.2 and drawn.min() == -1
    # By the share of a small square around some of the draws.
    for at in drawn[inside][:3]:
        share = (np.abs(drawn - at) < 0.05).all(1).mean()
        expected = given.log_prob(torch.from_numpy(at)).exp().item() * 0.1**2
        assert share == pytest.approx(expected, rel=0.2)


def starved(mesh: DeviceMesh) -> list[str]:
    compare = imported("in_context_rl", "compare")
    with compare.limited(80, "45 tokens", 2):
        fits = torch.empty(1 << 24).fill_(1)
    with pytest.raises(SystemExit) as ended, compare.limited(80, "45 tokens", 2):
        torch.empty(1 << 25).fill_(1)
    afterwards = torch.empty(1 << 25).fill_(1)  # the limit is gone
    return [str(ended.value), f"{fits[-1] + afterwards[-1]:.0f}"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's limits")
def test_what_does_not_fit_the_memory_ends_in_one_line(pool):
    """Of 64 and of 128 MB in 80."""
    said = "training on 45 tokens takes more than 80 MB of each of 2 processes: use more of them (--nproc-per-node)"
    assert pool.run(starved, 2) == [[said, "2"]] * 2


def test_without_dm_control_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dm_control", None)
    monkeypatch.delitem(sys.modules, "control", raising=False)
    with pytest.raises(SystemExit, match=r"pip install dm_control 'mujoco<4'"):
        imported("in_context_rl", "control")


def test_rewards_of_the_point_are_those_of_the_suite():
    pytest.importorskip("dm_control")
    point, random = imported("in_context_rl", "point"), np.random.default_rng(0)
    bodies = point.make(np.zeros((1, 2)), random)  # the suite's goal is in the middle
    [body] = bodies.made
    body.physics.named.model.geom_size["target", 0] = point.SIZE
    rewards = []
    for _ in range(9):
        bodies.reset()
        body.physics.data.qpos[:] = random.uniform(-0.15, 0.15, 2)
        _, reward = bodies.step(random.uniform(-1, 1, (1, 2)))
        rewards.append(reward[0])
        assert reward[0] == pytest.approx(
            body.task.get_reward(body.physics), rel=1e-5, abs=1e-6
        )
    assert max(rewards) > 0.5 and min(rewards) < 0.2


@pytest.mark.parametrize("name", ["point", "cartpole"])
def test_what_was_explored_is_relabelled_for_each_task(name, monkeypatch):
    pytest.importorskip("dm_control")
    control, world = (
        imported("in_context_rl", "control"),
        imported("in_context_rl", name),
    )
    monkeypatch.setattr(control, "POLICIES", 8)
    monkeypatch.setattr(control, "EXPLORED", 12)
    random = np.random.default_rng(0)
    tasks = world.tasks(3, random)
    data = world.collect(tasks, 10, random)
    shape = (3, 10, world.STEPS)
    assert data["rewards"].shape == shape and data["observed"].shape == (
        *shape,
        world.NUM_OBSERVED,
    )
    assert (
        data["actions"].shape == (*shape, world.NUM_ACTIONS)
        and (np.abs(data["actions"]) <= 1).all()
    )
    assert data["rewards"].min() >= 0 and data["rewards"].max() <= 1
