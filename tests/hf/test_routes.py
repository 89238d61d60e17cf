"""Rollouts of mixtures of experts whose routes are replayed: those of a server, and those of the pass before."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ringspan.core.errors import ConfigError
from ringspan.hf import RingConfig
from ringspan.hf.routes import KeptRoutes
from ringspan.torch.model.layers import routing
from tests.cases import long
from tests.hf.fake_engine import engines
from tests.hf.fake_vllm import FakeVLLM, serving
from tests.hf.rollouts import grpo, rloo
from tests.hf.test_vllm import STEPS, said, trained
from tests.hf.trainers import close, history, made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeVLLM]:
    made("gpt_oss").save_pretrained(tmp_path / "model")
    with serving(tmp_path / "model") as found:
        yield found


def replayed(
    mesh: Any,
    url: str | None,
    options: dict[str, Any],
    ring: dict[str, Any] | None,
    returned: str = "own",
) -> Any:
    """What a trainer logs, and the share of choices that routes of rollouts have changed.

    Engines on the ranks, if ``options`` ask for them, return the routes that ``returned`` says.
    """
    given = STEPS | {"adam_epsilon": 0.1, "max_steps": 2} | options
    if url is not None:
        given |= {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": url,
            "vllm_server_timeout": 5,
        }
    changed: list[torch.Tensor] = []
    plain = routing.Routing.answer

    def answer(self: Any, scores: torch.Tensor, found: Any) -> Any:
        result = plain(self, scores, found)
        if torch.is_grad_enabled():
            same = result.indices.sort(-1).values == found.indices.sort(-1).values
            changed.append(~same.all(-1))
        return result

    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        engines(routes=returned),
    ):
        patch.setattr(routing.Routing, "answer", answer)
        if url is not None:
            ring = {"vllm_weights_folder": folder} | ring
        trainer = grpo(mesh, "gpt_oss", ring, folder, given)
        trainer.train()
        share = float(torch.cat(changed).double().mean()) if changed else None
        found = history(trainer)
        found["eval_loss"] = found["loss"]  # no evaluation
        return found, share


@pytest.mark.parametrize(("make", "ranks"), long((grpo, 2), (grpo, 3), (rloo, 2)))
def test_routes_of_equal_weights_change_nothing(world, server, make, ranks):
    """Then a step equals TRL's own on one process, which replays none."""
    options = {"adam_epsilon": 0.1}
    expected, _ = trained_gpt_oss(None, make, None, server.url, options)
    ring = {"replay_routes": "rollout"}
    server.reload(server.folder)
    runs = world(ranks).run(trained_gpt_oss, ranks, make, ring, server.url, options)
    for found, _ in runs:
        close(found, expected)
    assert "/inference/v1/generate" in server.asked


def trained_gpt_oss(mesh: Any, make: Any, ring: Any, url: str, options: Any) -> Any:
    def of_gpt_oss(mesh: Any, _: str, *args: Any) -> Any:
        return make(mesh, "gpt_oss", *args)

    return trained(mesh, of_gpt_oss, ring, url, options)


def test_other_routes_of_a_server_are_trained_on(world, server):
    """A ring of two trains on them as one rank does."""
    server.routes = "others"
    found = {}
    for ranks in (1, 2):
        server.reload(server.folder)
        ring = {"replay_routes": "rollout"}
        [(logs, share), *_] = world(ranks).run(replayed, ranks, server.url, {}, ring)
        found[ranks] = logs
        assert share > 0.5, "they are not those that the model would choose"
    close(found[2], found[1])


def without_engines(mesh: Any, options: Any, ring: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        grpo(mesh, "gpt_oss", ring, folder, STEPS | options)


@pytest.fixture
def engine(tmp_path: Path) -> dict[str, Any]:
    """The options of a trainer whose completions engines on its own ranks make."""
    made("gpt_oss").save_pretrained(tmp_path / "model")
    place = str(tmp_path / "model")
    return {"use_vllm": True, "vllm_mode": "colocate", "place": place}


@pytest.mark.parametrize(
    ("ranks", "engine_ranks"), long((2, 1), (2, 2), (3, 1), (4, 2))
)
def test_routes_of_engines_with_equal_weights_change_nothing(
    world, engine, ranks, engine_ranks
):
    expected, _ = replayed(None, None, engine, None)
    options = engine | {"vllm_tensor_parallel_size": engine_ranks}
    ring = {"replay_routes": "rollout"}
    for found, share in world(ranks).run(replayed, ranks, None, options, ring):
        close(found, expected)
        assert share == 0


@pytest.mark.long
def test_other_routes_of_engines_are_trained_on(world, engine):
    found = {}
    for ranks in (1, 2):
        ring = {"replay_routes": "rollout"}
        every = world(ranks).run(replayed, ranks, None, engine, ring, "others")
        assert min(share for _, share in every) > 0.5
        found[ranks] = every[0][0]
    close(found[2], found[1])


def test_without_vllm_trl_says_so(world, engine):
    ring = {"replay_routes": "rollout"}
    for error in world(2).outcomes(without_engines, 2, engine, ring):
        assert type(error) is ImportError, error
        assert "vLLM is not available" in str(error)


def test_an_engine_without_routes_is_named(world, engine):
    ring = {"replay_routes": "rollout"}
    for error in world(2).outcomes(replayed, 2, None, engine, ring, "none"):
        assert type(error) is ConfigError
        assert "returns no routes of its experts; update it, or set" in str(error)


@pytest.mark.long
def test_later_iterations_train_on_old_routes(world):
    """Weights move between iterations, routes do not."""
    options = {"num_iterations": 3, "learning_rate": 0.3}
    shares = {}
    for ranks in (1, 2):
        ring = {"replay_routes": "old"}
        [(logs, share), *_] = world(ranks).run(replayed, ranks, None, options, ring)
        shares[ranks] = logs, share
    close(shares[2][0], shares[1][0])
    assert min(share for _, share in shares.values()) > 0.1


@pytest.mark.parametrize(
    ("routes", "missing", "remedy"),
    [
        ("none", set(), "restart it with --enable-return-routed-experts"),
        ("own", {"/inference/v1/generate"}, "restart it with --enable-scale-out"),
    ],
)
def test_a_server_without_routes_is_named(
    world, server, tmp_path, routes, missing, remedy
):
    server.routes, server.missing = routes, missing
    kind, message = said(
        world, server, tmp_path, ring={"replay_routes": "rollout"}, model="gpt_oss"
    )
    assert kind is ConfigError and message.endswith(remedy)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replay_routes": "new"}, "replay_routes='new'; use one of rollout, old"),
        ({"replay_routes": "old", "shared_prefix": True}, "leave one of the two out"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        RingConfig(**options)


def of_a_trainer(mesh: Any, model: str, replay: str) -> str:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ConfigError) as raised:
        grpo(mesh, model, {"replay_routes": replay}, folder, STEPS)
    return str(raised.value)


@pytest.mark.parametrize(
    ("model", "replay", "said"),
    [
        ("llama", "old", "has no mixtures of experts; leave it out"),
        (
            "gpt_oss",
            "rollout",
            "takes the routes that vLLM returns; set use_vllm=True, or use 'old'",
        ),
    ],
)
def test_a_trainer_that_cannot_replay_says_so(world, model, replay, said):
    for message in world(2).run(of_a_trainer, 2, model, replay):
        assert said in message


def test_rows_are_found_again_without_their_padding():
    kept = KeptRoutes(records=False)
    routes = torch.arange(2 * 3 * 2).view(2, 3, 2)
    kept.keep([5, 6, 7], routes)
    ids = torch.tensor([[0, 5, 6, 7], [5, 6, 7, 0], [5, 6, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    found = kept.routes_of({"input_ids": ids, "attention_mask": mask})
    assert found is not None
    live = torch.full((1, 3, 2), -1)
    expected = [
        torch.cat([live, routes, live]),
        torch.cat([routes, live, live]),
        live.expand(4, -1, -1),
    ]
    assert torch.equal(found.long(), torch.stack(expected))
    kept.begin()
    assert kept.routes_of({"input_ids": ids, "attention_mask": mask}) is None
