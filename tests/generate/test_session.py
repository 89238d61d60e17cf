"""A rank that is killed or stopped while it generates is named by the other one."""

import os
import re
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from ringspan.core.errors import EXIT_PEER_LOST, EXIT_STALLED, UnsupportedError
from ringspan.generate.folder import load_config, load_tokenizer
from ringspan.generate.session import Observer, session
from ringspan.generate.settings import GenerateSettings
from tests.cases import long
from tests.cli.commands.test_generate import save_model, save_tokenizer
from tests.every_model.tiny import tiny_config
from tests.ranks import ended


def strike_itself(settings: GenerateSettings, number: Signals, doing: str) -> None:
    """Answer; rank 1 is struck while it reads, rank 0 while it writes."""
    config, observer = load_config(settings), Observer()
    tokenizer = load_tokenizer(settings.folder, config)
    if (dist.get_rank(), doing) in ((1, "read"), (0, "wrote")):
        setattr(observer, doing, lambda *_: os.kill(os.getpid(), number))
    with session(settings, config, tokenizer, observer) as model:
        model.answer(tokenizer("abc " * 30).input_ids)


def struck(folder, number: Signals, doing: str, code: int, says: str) -> None:
    save_tokenizer(folder)
    save_model(folder)
    settings = GenerateSettings(
        folder=str(folder), max_new_tokens=100, prefill_tokens=16, silence_seconds=3
    )
    codes, errors = ended(folder, strike_itself, settings, number, doing)
    victim = 1 if doing == "read" else 0
    # The watchdog ends whom it does not hear, too: a stopped process does not end by itself.
    assert codes[victim] == -SIGKILL and codes[1 - victim] == code, errors
    assert re.search(says.format(victim), errors[1 - victim]), errors


@pytest.mark.parametrize("doing", ["read", *long("wrote")])
def test_a_rank_that_is_killed_is_named(tmp_path, doing):
    struck(tmp_path, SIGKILL, doing, EXIT_PEER_LOST, "rank {} died at")


@pytest.mark.alone
@pytest.mark.parametrize("doing", [*long("read"), "wrote"])
def test_a_rank_that_is_stopped_is_named(tmp_path, doing):
    says = r"no progress for .*: rank {} .*\(silent, stopped or cut off\)"
    struck(tmp_path, SIGSTOP, doing, EXIT_STALLED, says)


def what_a_cache_asks(mesh: Any, settings: GenerateSettings) -> tuple[str, list[str]]:
    """Why a cache cannot be saved, and what was read and written before that was said."""
    config, seen = load_config(settings), list[str]()
    tokenizer = load_tokenizer(settings.folder, config)
    observer = Observer(read=lambda *_: seen.append("read"), wrote=seen.append)
    with (
        session(settings, config, tokenizer, observer) as model,
        pytest.raises(UnsupportedError) as caught,
    ):
        model.answer_once(tokenizer("abc").input_ids)
    return str(caught.value), seen


@pytest.mark.parametrize(
    ("kind", "why"),
    [*long(("deepseek_v4", "index chooses pools")), ("bamba", "states of Bamba")],
)
def test_a_cache_that_cannot_be_saved_is_refused_first(pool, tmp_path, kind, why):
    save_tokenizer(tmp_path)
    made = tiny_config(kind)
    made.vocab_size = 512
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    settings = GenerateSettings(
        folder=str(tmp_path), max_new_tokens=2, save_cache=str(tmp_path / "cache")
    )
    for said, seen in pool.run(what_a_cache_asks, 4, settings):
        assert (
            said.startswith("--save-cache")
            and why in said
            and said.endswith("without the option")
            and not seen
        )
