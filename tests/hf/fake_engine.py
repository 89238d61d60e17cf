"""vLLM's engine as TRL starts it in a trainer's own processes, with transformers inside."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from tests.hf.fake_vllm import drawn, returned_routes, take

ASLEEP = frozenset({"weights", "kv_cache"})


class FakeEngine:
    """One rank of ``vllm.LLM``: all ranks of an engine compute the same. ``fails_at`` names a method that raises.

    ``routes`` says what answers tell of routes if an engine is asked for them: the model's own, others, or none.
    """

    fails_at: str | None = None
    routes: str = "own"

    def __init__(self, **given: Any) -> None:
        self.given = given
        self._fail("start")
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            given["model"], dtype=torch.float32
        ).eval()
        self.asleep: frozenset[str] = frozenset()
        self.asked: list[list[int]] = []
        self.loads = self.resets = 0
        runner = SimpleNamespace(model=self)
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker)
        )

    def _fail(self, at: str) -> None:
        if self.fails_at == at:
            raise ValueError(f"no memory to {at}")

    def load_weights(self, weights: Any) -> None:
        """Take some weights, as TRL's own trainer hands them over, one at a time."""
        own = self.model.state_dict()
        for name, tensor in weights:
            own[name].copy_(tensor)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        assert "weights" not in self.asleep
        found = {}
        for name, tensor in kwargs["weights_iterator"]:
            found[name] = tensor
            self._fail("reload")
        take(self.model, found)
        self.loads += 1

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def sleep(self, level: int) -> None:
        """Lose the weights, as at level 2."""
        assert level == 2
        for parameter in self.model.parameters():
            parameter.data.fill_(float("nan"))
        self.asleep = ASLEEP

    def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)

    def generate(
        self, prompts: list[Any], sampling_params: dict[str, Any], use_tqdm: bool
    ) -> list[Any]:
        """Draw a completion for each prompt; it depends on the prompt and its place among equal ones alone."""
        self._fail("generate")
        assert not self.asleep and sampling_params["n"] == 1 and not use_tqdm
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        self.asked += rows
        outputs = []
        for number, ids in enumerate(rows):
            place = rows[:number].count(ids)
            generator = torch.Generator().manual_seed(sum(ids) * 31 + place)
            answer, logprobs = drawn(self.model, ids, sampling_params, generator)
            chosen = [
                {token: SimpleNamespace(logprob=logprob, rank=1)}
                for token, logprob in zip(answer, logprobs, strict=True)
            ]
            one = SimpleNamespace(
                token_ids=answer,
                logprobs=chosen,
                routed_experts=self._routes_of(ids + answer),
            )
            outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=[one]))
        return outputs

    def _routes_of(self, ids: list[int]) -> np.ndarray | None:
        asked = self.given.get("enable_return_routed_experts", False)
        if not asked or self.routes == "none":
            return None
        return returned_routes(self.model, ids, self.routes)


@contextmanager
def engines(fails_at: str | None = None, routes: str = "own") -> Iterator[None]:
    """Let TRL find this engine in place of vLLM's; its variables of the environment go with it."""
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "fails_at", fails_at)
        patch.setattr(FakeEngine, "routes", routes)
        patch.setattr(vllm_generation, "is_vllm_available", lambda: True)
        patch.setattr(vllm_generation, "LLM", FakeEngine, raising=False)
        patch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ |= environment
