"""The Agentic Transformer (Liu and Abbeel 2023): one sequence is several trajectories, the worse before the better.

A token is a step: what is seen, what was done and gained before it, and the return that is still to come. Hindsight
gives all trajectories of a sequence the return of its best one as their aim, so that each further one is an attempt
to do better, and the last one does. Actions are indices, or numbers, for which the agent gives a mixture of normal
distributions. B sequences, E trajectories, T steps of each, A numbers of an action.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from transformers import AutoModel, DynamicCache, LlamaConfig, PreTrainedModel

MIXED: Final = 4
"""Normal distributions in the mixture for actions that are numbers."""
NARROWEST: Final = 0.2
"""Their smallest deviation: to tell where an action leads is worth more to the loss than to tell its last digit."""


class Agent(PreTrainedModel):
    """A decoder of transformers between an input and an output layer of its own."""

    config_class = LlamaConfig
    base_model_prefix = "decoder"
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.reads = nn.Linear(config.num_features, config.hidden_size)
        self.decoder = AutoModel.from_config(config)
        self.writes = nn.Linear(config.hidden_size, config.num_answers)
        self.post_init()

    def forward(self, features: Tensor, position_ids: Tensor, **options: Any) -> Tensor:
        """What ``policy`` reads (B, T, num_answers), from features (B, T, num_features)."""
        embedded = self.reads(features)
        return self.writes(
            self.decoder(
                inputs_embeds=embedded, position_ids=position_ids, **options
            ).last_hidden_state
        )


@dataclass(frozen=True)
class Kind:
    """What is compared."""

    trajectories: int
    """In one sequence."""
    conditioned: bool = True
    """On returns and rewards; without, it is behaviour cloning."""


def make_agent(
    world: ModuleType,
    kind: Kind,
    seed: int,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
) -> Agent:
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
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0 * max(length, 100),
        },
        num_features=world.NUM_OBSERVED + world.NUM_ACTIONS + 4,
        num_answers=world.NUM_ACTIONS
        if world.ACTIONS_ARE_INDICES
        else MIXED * (1 + 2 * world.NUM_ACTIONS),
    )
    agent = Agent(config)
    for name, weight in agent.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(
                weight,
                std=1.0 if name == "reads.weight" else (3 * weight.shape[1]) ** -0.5,
            )
    return agent


def drawn_from(
    data: dict[str, np.ndarray], batch: int, trajectories: int, random: Any
) -> dict[str, np.ndarray]:
    """Some trajectories of some tasks (batch, E, T, ...), those of each task in ascending order of return."""
    returns = data["rewards"].sum(-1)
    tasks = random.integers(0, len(returns), batch)[:, None]
    chosen = random.random((batch, returns.shape[1])).argsort(1)[:, :trajectories]
    chosen = np.take_along_axis(
        chosen, returns[tasks, chosen].argsort(1, kind="stable"), 1
    )
    return {name: value[tasks, chosen] for name, value in data.items()}


def encoded(world: ModuleType, actions: np.ndarray) -> np.ndarray:
    """Actions as features: one-hot where they are indices."""
    return (
        np.eye(world.NUM_ACTIONS, dtype=np.float32)[actions]
        if world.ACTIONS_ARE_INDICES
        else actions
    )


def features(
    world: ModuleType, kind: Kind, observed: np.ndarray, before: np.ndarray, reward: np.ndarray, to_go: np.ndarray,
    first: np.ndarray, reached: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Tokens (..., num_features) from what is known before an action."""
    told = np.stack([reward, to_go / world.SCALE, reached], -1) * kind.conditioned
    return np.concatenate([observed, before, told, first[..., None]], -1).astype(
        np.float32
    )


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
        world,
        kind,
        flat(data["observed"]),
        shifted(encoded(world, flat(data["actions"]))),
        shifted(flat(rewards)),
        flat(to_go),
        flat(first),
        flat(reached),
    )
    return {
        "features": torch.from_numpy(made),
        "actions": torch.from_numpy(flat(data["actions"])),
        "mask": torch.ones(batch, length),
    }


def policy(world: ModuleType, answers: Tensor) -> Categorical | MixtureSameFamily:
    """The distribution of actions, for answers (..., num_answers)."""
    if world.ACTIONS_ARE_INDICES:
        return Categorical(logits=answers)
    shares, means, spreads = answers.split(
        [MIXED, MIXED * world.NUM_ACTIONS, MIXED * world.NUM_ACTIONS], -1
    )
    shape = (*answers.shape[:-1], MIXED, world.NUM_ACTIONS)
    each = Normal(
        means.reshape(shape),
        NARROWEST + nn.functional.softplus(spreads.reshape(shape) - 1),
    )
    return MixtureSameFamily(Categorical(logits=shares), Independent(each, 1))


def errors(world: ModuleType, answers: Tensor, actions: Tensor) -> Tensor:
    """The loss of each token (B, T): the surprise at its action."""
    return -policy(world, answers).log_prob(actions)


@torch.no_grad()
def attempts(
    world: ModuleType,
    agent: Agent,
    kind: Kind,
    tasks: np.ndarray,
    count: int,
    random: Any,
) -> np.ndarray:
    """Returns (B, count) of attempts one after the other, each with those before it in context, as far as they fit."""
    returns, cache, place = np.zeros((len(tasks), count)), DynamicCache(), 0
    environment = world.make(tasks, random)
    for attempt in range(count):
        if attempt % kind.trajectories == 0:  # the context is full: begin anew
            cache, place = DynamicCache(), 0
            before, reward = (
                np.zeros((len(tasks), world.NUM_ACTIONS)),
                np.zeros(len(tasks)),
            )
            reached = np.zeros(len(tasks))
        observed, first = environment.reset(), np.ones(len(tasks))
        for _ in range(world.STEPS):
            to_go = world.WANTED - returns[:, attempt]
            token = features(
                world, kind, observed, before, reward, to_go, first, reached
            )
            answer = agent(
                torch.from_numpy(token)[:, None],
                torch.tensor([[place]]),
                past_key_values=cache,
                use_cache=True,
            )[:, 0]
            action = drawn(answer, world, random)
            observed, reward = environment.step(action)
            returns[:, attempt] += reward
            before, first, reached, place = (
                encoded(world, action),
                first * 0,
                reached * 0,
                place + 1,
            )
        reached = (returns[:, attempt] >= world.WANTED).astype(float)
    return returns


def drawn(answer: Tensor, world: ModuleType, random: Any) -> np.ndarray:
    """Actions (B, ...), drawn by their likelihood."""
    given = policy(world, answer.double())
    if isinstance(given, Categorical):
        return index_drawn(given, random)
    each, chosen = (
        given.component_distribution.base_dist,
        index_drawn(given.mixture_distribution, random),
    )
    mean, spread = (
        value[torch.arange(len(chosen)), chosen].numpy()
        for value in (each.loc, each.scale)
    )
    return (
        (mean + spread * random.normal(size=mean.shape)).clip(-1, 1).astype(np.float32)
    )


def index_drawn(given: Categorical, random: Any) -> np.ndarray:
    """An index (B,) of each row."""
    likely = given.probs.numpy().cumsum(-1)
    return (
        (likely < random.random((len(likely), 1)))
        .sum(-1)
        .clip(max=likely.shape[-1] - 1)
    )
