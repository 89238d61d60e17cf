"""GRPO and RLOO whose completions a server of vLLM makes: on rings as with TRL's own trainer on one process."""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.generation import vllm_generation

from benchmarks.log_prob_gap import leaves
from benchmarks.result_files import RESULTS
from ringspan.core.errors import ConfigError, PeerMismatch
from ringspan.hf import RingConfig
from ringspan.hf.refusals import refuse_vllm
from ringspan.hf.vllm_client import RingVLLMClient
from ringspan.torch.model.named_weights import WeightMeta
from tests.cases import long
from tests.hf.fake_vllm import FakeVLLM, serving
from tests.hf.rollouts import grpo, rloo
from tests.hf.trainers import close, history, made
from tests.torch.models import build, logged

RATIOS = tuple(
    f"sampling/{name}"
    for name in (
        "sampling_logp_difference/mean",
        "sampling_logp_difference/max",
        "importance_sampling_ratio/min",
        "importance_sampling_ratio/mean",
        "importance_sampling_ratio/max",
    )
)
STEPS = {"max_steps": 3, "beta": 0.0, "sampled": True, "num_generations": 2}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeVLLM]:
    made("llama").save_pretrained(tmp_path / "model")
    with serving(tmp_path / "model") as found:
        yield found


class Client(RingVLLMClient):
    """The client as TRL's own trainer makes it: weights of one process, by the same folder."""

    def __init__(
        self, base_url: str, group_port: int, connection_timeout: float
    ) -> None:
        super().__init__(base_url, group_port, connection_timeout, "unused")

    def init_communicator(self, device: Any = 0) -> None: ...

    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory() as folder:
            found = {name: x.detach().clone() for name, x in named_params}
            save_file(found, f"{folder}/model.safetensors")
            self._once(
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": folder}},
            )


def trained(
    mesh: Any, make: Any, ring: dict[str, Any] | None, url: str, options: dict[str, Any]
) -> Any:
    """What a trainer logs of some steps, and how far the server's numbers are from the trainer's."""
    given = STEPS | {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 5,
    }
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if ring is None:
            patch.setattr(vllm_generation, "is_vllm_available", lambda *_, **__: True)
            patch.setattr(vllm_generation, "VLLMClient", Client)
        else:
            ring = {"vllm_weights_folder": folder} | ring
        trainer = make(mesh, "llama", ring, folder, given | options)
        trainer.train()
        found = history(trainer)
        logs = [one for one in trainer.state.log_history if "loss" in one]
        found["eval_loss"] = found["loss"]  # no evaluation
        assert not list(Path(folder).glob(".ringspan-*")), "it is tidied up"
        return found, [[one.get(name) for name in RATIOS] for one in logs]


def close_ratios(
    found: list[list[Any]], expected: list[list[Any]], *, logs_none: bool = False
) -> None:
    """Hold the logged ratios to those of one process; vLLM had the weights of each step if they are near 1."""
    for one, other in zip(found, expected, strict=True):
        if logs_none:  # as RLOO, which has no such ratio
            assert one == other == [None] * len(RATIOS)
            continue
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
        assert one[1] < 1e-4, "it has the weights of the step"


@pytest.mark.parametrize(
    ("make", "options", "ranks", "ring", "replicate"),
    [
        (grpo, {}, 2, {}, 1),
        *long(
            (rloo, {}, 2, {}, 1),
            (grpo, {"lora": True}, 2, {}, 1),
            (grpo, {}, 4, {}, 2),
            (rloo, {}, 4, {}, 2),
            (grpo, {}, 2, {"shared_prefix": True, "min_shared_tokens": 1}, 1),
            (grpo, {"lora": True}, 2, {"vllm_adapter_only": True}, 1),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_steps_with_a_server_equal_one_process(
    world, server, make, options, ranks, ring, replicate
):
    alone = {
        "per_device_train_batch_size": 2 * replicate,
        "per_device_eval_batch_size": 2 * replicate,
    }
    expected, ratios = trained(None, make, None, server.url, options | alone)
    assert min(expected["reward_std"]) > 0
    rows, server.rows = server.rows, 0
    server.reload(server.folder)
    for found, near in world(ranks).run(
        trained, ranks, make, ring, server.url, options, replicate=replicate
    ):
        if replicate > 1:  # a mean of means over other batches
            found["entropy"] = expected["entropy"]
        close(found, expected)
        close_ratios(near, ratios, logs_none=make is rloo)
    # The two rows more tell the vocabulary.
    assert rows == server.rows - 1, "each replica asks once"


def asks(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A user's rollout: the server's completions, with a column for rewards."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    _, completions, logprobs, _ = trainer.vllm_generation.generate(
        prompts=ids, images=None, num_generations=trainer.num_generations
    )
    return {
        "prompt_ids": ids,
        "completion_ids": completions,
        "logprobs": [[one[0] for one in row] for row in logprobs],
    }


def test_a_rollout_of_ones_own_asks_the_server_once(world, server):
    options = {"max_steps": 2, "rollout_func": asks}
    expected, ratios = trained(None, grpo, None, server.url, options)
    rows, server.rows = server.rows, 0
    server.reload(server.folder)
    for found, near in world(2).run(trained, 2, grpo, {}, server.url, options):
        close(found, expected)
        close_ratios(near, ratios)
    assert rows == server.rows - 1, "the ring asks once"


def ended(
    mesh: Any, url: str, folder: str, options: dict[str, Any], ring: dict[str, Any]
) -> None:
    given = STEPS | {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 0,
        "bf16": False,
    }
    ring, options = {"vllm_weights_folder": folder} | ring, dict(options)
    model = options.pop("model", "llama")
    trainer = grpo(mesh, model, ring, folder, given | options)
    client = getattr(trainer.vllm_generation, "vllm_client", None)
    if client is not None:  # TRL's own waits between retries are a minute
        for adapter in client.session.adapters.values():
            adapter.max_retries = adapter.max_retries.new(backoff_factor=0)
    trainer.train()


def said(world: Any, server: Any, folder: Path, **given: Any) -> tuple[Any, str]:
    """What the first rank raises, and what the other one says of it, in one line each."""
    ring, url = given.pop("ring", {}), given.pop("url", None) or server.url
    first, other = world(2).outcomes(ended, 2, url, str(folder), given, ring)
    assert isinstance(first, Exception) and isinstance(other, Exception), (first, other)
    assert "\n" not in str(first) + str(other)
    assert type(other) in (type(first), PeerMismatch) and str(first) in str(other)
    assert not list(folder.glob(".ringspan-*"))
    return type(first), str(first)


@pytest.mark.parametrize(
    ("path", "doing"),
    [("/v1/completions", "asking"), *long(("/collective_rpc", "updating"))],
)
def test_a_server_that_dies_is_named_on_every_rank(
    world, server, tmp_path, path, doing
):
    def die_at_second() -> None:
        server.dies_at = path

    server.before = {"/collective_rpc": (2, die_at_second)}
    kind, message = said(world, server, tmp_path)
    assert kind is ConnectionError, doing
    assert f"the vLLM server at {server.url} does not answer" in message
    assert server.asked.count("/collective_rpc") >= 1


def test_no_server_is_named_on_every_rank(world, tmp_path):
    kind, message = said(world, None, tmp_path, url="http://127.0.0.1:9")
    assert kind is ConnectionError
    assert "the vLLM server at http://127.0.0.1:9 does not answer" in message


def test_weights_that_a_server_does_not_take_are_named(world, server, tmp_path):
    server.fails["/collective_rpc"] = "size of model.norm.weight"
    kind, message = said(world, server, tmp_path)
    assert kind is ConfigError
    assert "did not take the weights (model.norm.weight, [64]): " in message
    assert "size of model.norm.weight" in message
    # A whole update later puts the server right.
    del server.fails["/collective_rpc"]
    world(2).run(ended, 2, server.url, str(tmp_path), {"max_steps": 1}, {})
    assert server.asked[-1] != "/collective_rpc"


def test_a_server_of_another_vocabulary_is_refused(world, tmp_path):
    build("llama", vocab_size=101).save_pretrained(tmp_path / "other")
    with serving(tmp_path / "other") as server:
        kind, message = said(world, server, tmp_path)
    assert kind is ConfigError
    assert "has another vocabulary than this model, which has 97 tokens" in message


def test_a_server_without_a_way_for_weights_is_refused(world, server, tmp_path):
    kind, message = said(world, server, tmp_path, ring={"vllm_weights_folder": None})
    assert kind is ConfigError
    assert "has no weight-transfer engine; restart it with" in message


@pytest.mark.parametrize(
    ("is_dev", "message"),
    [
        (False, "has no development endpoints.*restart it with VLLM_SERVER_DEV_MODE=1"),
        (True, "answers 500 to /server_info: .*no pip.*install pip into the server's"),
    ],
)
def test_a_server_that_does_not_tell_its_settings_is_asked_once(
    server, is_dev, message
):
    server.is_dev = is_dev
    server.fails = {"/server_info": "no pip"} if is_dev else {}
    client = RingVLLMClient(server.url, 0, 0, "somewhere")
    with pytest.raises(ConfigError, match=message):
        client.prepare(torch.device("cpu"), 97)
    assert server.asked.count("/server_info") == 1


def test_a_server_takes_the_adapters_of_a_second_training(server, tmp_path):
    adapted = get_peft_model(made("llama"), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    told = [WeightMeta("q_proj.lora_A.weight", torch.float32, (8, 64))]
    for _ in range(2):
        client = RingVLLMClient(server.url, 0, 0, str(tmp_path))
        for _ in range(2):
            client.load_adapter(tmp_path / "adapter", told)
        assert client.model in server.adapters
    assert len(server.adapters) == 2, "the last ones of both"


def test_a_folder_that_cannot_be_written_is_named(world, server, tmp_path):
    gone = str(tmp_path / "gone")
    kind, message = said(world, server, tmp_path, ring={"vllm_weights_folder": gone})
    assert kind is FileNotFoundError and gone in message


def test_options_that_nobody_would_read_are_refused():
    for uses, mode in ((False, "server"), (True, "colocate")):
        args: Any = SimpleNamespace(use_vllm=uses, vllm_mode=mode)
        with pytest.raises(
            ConfigError, match="is for use_vllm=True with vllm_mode='se"
        ):
            refuse_vllm(args, RingConfig(vllm_weights_folder="somewhere"))
    with pytest.raises(ConfigError, match="set vllm_weights_folder"):
        RingConfig(vllm_adapter_only=True)


@pytest.mark.parametrize(
    ("mode", "longest", "corrects", "warns"),
    [
        ("sequence_mask", 4651, True, True),
        ("sequence_truncate", 32768, True, True),
        ("sequence_mask", 4650, True, False),
        ("sequence_mask", 32768, False, False),
        ("token_truncate", 32768, True, False),
    ],
)
def test_a_product_of_many_ratios_is_warned_of(mode, longest, corrects, warns):
    args: Any = SimpleNamespace(
        use_vllm=True,
        vllm_mode="server",
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_correction=corrects,
        max_completion_length=longest,
    )
    with logged() as lines:
        refuse_vllm(args, RingConfig())
    assert len(lines) == warns
    assert not warns or f"up to {longest} tokens" in lines[0]
    assert not warns or "from 4650 tokens on; use 'token_truncate'" in lines[0]


def test_the_length_of_the_warning_is_that_of_the_measured_noise():
    rows = json.loads((RESULTS / "log-prob-gap-cpu.json").read_text())["rows"]
    shortest = min(row["leaves_tokens"] for row in rows)
    assert shortest == pytest.approx(4650, rel=0.01)
    for row in rows:
        assert row["leaves_tokens"] == pytest.approx(
            leaves(row["mean"], row["deviation"])
        )
    assert leaves(0.0, 0.05) == pytest.approx((math.log(2) / 0.05) ** 2)
    assert leaves(0.01, 0.0) == pytest.approx(math.log(2) / 0.01)
