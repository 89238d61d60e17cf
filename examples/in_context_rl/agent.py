"""The Agentic Transformer (Liu and Abbeel 2023): one sequence is several trajectories, the worse before the better.

A token is a step: what is seen, what was done and gained before it, and the return that is still to come. Hindsight
gives all trajectories of a sequence the return of its best one as their aim, so that each further one is an attempt
to do better, and the last one does. B sequences, E trajectories, T steps of each.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, DynamicCache, LlamaConfig, PreTrainedModel


class Agent(PreTrainedModel):
    """A decoder of transformers between an input and an output layer of its own."""

    config_class = LlamaConfig
    base_model_prefix = "decoder"
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.reads = nn.Linear(config.num_features, config.hidden_size)
        self.decoder = AutoModel.from_config(config)
        self.writes = nn.Linear(config.hidden_size, config.num_actions)
        self.post_init()

    def forward(self, features: Tensor, position_ids: Tensor, **options: Any) -> Tensor:
        """Logits of actions, or actions (B, T, num_actions), from features (B, T, num_features)."""
        embedded = self.reads(features)
        return self.writes(self.decoder(inputs_embeds=embedded, position_ids=position_ids, **options).last_hidden_state)


@dataclass(frozen=True)
class Kind:
    """What is compared."""

    trajectories: int
    """In one sequence."""
    conditioned: bool = True
    """On returns and rewards; without, it is behaviour cloning."""


def make_agent(world: ModuleType, kind: Kind, seed: int, hidden: int = 64, layers: int = 2) -> Agent:
    """An agent with random weights, alike for a seed."""
    torch.manual_seed(seed)
    length = kind.trajectories * world.STEPS
    config = LlamaConfig(
        vocab_size=1,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0 * max(length, 100)},
        num_features=world.NUM_OBSERVED + world.NUM_ACTIONS + 4,
        num_actions=world.NUM_ACTIONS,
    )
    agent = Agent(config)
    for name, weight in agent.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=1.0 if name == "reads.weight" else (3 * weight.shape[1]) ** -0.5)
    return agent


def collect(world: ModuleType, tasks: np.ndarray, trajectories: int, random: Any) -> dict[str, np.ndarray]:
    """Trajectories (B, E, T, ...) of the exploration policy in each task, in the order in which they were made."""
    environment, policy = world.make(tasks, random), world.Explorer(len(tasks), random)
    seen, done, gained = [], [], []
    for _ in range(trajectories):
        observed = environment.reset()
        policy.begin()
        for _ in range(world.STEPS):
            seen.append(observed)
            done.append(policy.act(observed))
            observed, rewards = environment.step(done[-1])
            policy.learn(observed, rewards)
            gained.append(rewards)
    return {
        name: np.stack(column, 1).reshape(len(tasks), trajectories, world.STEPS, *column[0].shape[1:])
        for name, column in (("observed", seen), ("actions", done), ("rewards", gained))
    }


def drawn_from(data: dict[str, np.ndarray], batch: int, trajectories: int, random: Any) -> dict[str, np.ndarray]:
    """Some trajectories of some tasks (batch, E, T, ...), those of each task in ascending order of return."""
    returns = data["rewards"].sum(-1)
    tasks = random.integers(0, len(returns), batch)[:, None]
    chosen = random.random((batch, returns.shape[1])).argsort(1)[:, :trajectories]
    chosen = np.take_along_axis(chosen, returns[tasks, chosen].argsort(1, kind="stable"), 1)
    return {name: value[tasks, chosen] for name, value in data.items()}


def encoded(world: ModuleType, actions: np.ndarray) -> np.ndarray:
    """Actions as features: one-hot where they are indices."""
    return actions if actions.dtype.kind == "f" else np.eye(world.NUM_ACTIONS, dtype=np.float32)[actions]


def features(
    world: ModuleType, kind: Kind, observed: np.ndarray, before: np.ndarray, reward: np.ndarray, to_go: np.ndarray,
    first: np.ndarray, reached: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Tokens (..., num_features) from what is known before an action."""
    told = np.stack([reward, to_go / world.SCALE, reached], -1) * kind.conditioned
    return np.concatenate([observed, before, told, first[..., None]], -1).astype(np.float32)


def sequences(
    world: ModuleType, kind: Kind, data: dict[str, np.ndarray], aim: float | None = None
) -> dict[str, Tensor]:
    """Features and actions (B, E x T, ...) of sorted trajectories, with returns-to-go of the best one, or of an aim."""
    rewards = data["rewards"]
    batch, length = len(rewards), rewards.shape[1] * rewards.shape[2]
    returns = rewards.sum(-1)
    best = returns[:, -1:] if aim is None else np.full((batch, 1), aim)
    to_go = best[..., None] - rewards.cumsum(-1) + rewards

    def flat(value: np.ndarray) -> np.ndarray:
        return value.reshape(batch, length, *value.shape[3:])

    def shifted(value: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(value[:, :1]), value[:, :-1]], 1)

    first = np.zeros_like(rewards)
    first[:, :, 0] = 1
    reached = np.zeros_like(rewards)
    reached[:, 1:, 0] = returns[:, :-1] >= best
    made = features(
        world, kind, flat(data["observed"]), shifted(encoded(world, flat(data["actions"]))), shifted(flat(rewards)),
        flat(to_go), flat(first), flat(reached),
    )  # fmt: skip
    return {
        "features": torch.from_numpy(made),
        "actions": torch.from_numpy(flat(data["actions"])),
        "mask": torch.ones(batch, length),
    }


def errors(answers: Tensor, actions: Tensor) -> Tensor:
    """The loss of each token (B, T): of indices their surprise, of numbers their squared distance."""
    if actions.is_floating_point():
        return (answers.tanh() - actions).square().mean(-1)
    return nn.functional.cross_entropy(answers.transpose(1, 2), actions, reduction="none")


@torch.no_grad()
def attempts(world: ModuleType, agent: Agent, kind: Kind, tasks: np.ndarray, count: int, random: Any) -> np.ndarray:
    """Returns (B, count) of attempts one after the other, each with those before it in context, as far as they fit."""
    returns, cache, place = np.zeros((len(tasks), count)), DynamicCache(), 0
    environment = world.make(tasks, random)
    for attempt in range(count):
        if attempt % kind.trajectories == 0:  # the context is full: begin anew
            cache, place = DynamicCache(), 0
            before, reward = np.zeros((len(tasks), world.NUM_ACTIONS)), np.zeros(len(tasks))
            reached = np.zeros(len(tasks))
        observed, first = environment.reset(), np.ones(len(tasks))
        for _ in range(world.STEPS):
            to_go = world.WANTED - returns[:, attempt]
            token = features(world, kind, observed, before, reward, to_go, first, reached)
            answer = agent(
                torch.from_numpy(token)[:, None], torch.tensor([[place]]), past_key_values=cache, use_cache=True
            )[:, 0]
            action = drawn(answer, world, random)
            observed, reward = environment.step(action)
            returns[:, attempt] += reward
            before, first, reached, place = encoded(world, action), first * 0, reached * 0, place + 1
        reached = (returns[:, attempt] >= world.WANTED).astype(float)
    return returns


def drawn(answer: Tensor, world: ModuleType, random: Any) -> np.ndarray:
    """Actions: indices drawn by their likelihood, or numbers as they are."""
    if world.NUM_ACTIONS == 1:
        return answer.tanh().numpy()
    likely = answer.double().softmax(-1).numpy()
    return (likely.cumsum(-1) < random.random((len(likely), 1))).sum(-1).clip(max=world.NUM_ACTIONS - 1)
