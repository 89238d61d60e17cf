"""The Hub out of reach: one line at once, and what is in the cache still opens."""

import socket

import pytest
from huggingface_hub import constants

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import one_line, shortened
from ringspan.plan.model import hub
from tests.cli.test_bad_input import refusal, workplace  # noqa: F401  workplace is a fixture


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """How often a Hub was asked whose port nobody listens at; the cache is empty."""
    asked, connect = [], socket.socket.connect
    monkeypatch.setattr(
        socket.socket,
        "connect",
        lambda *given: asked.append(given[1]) or connect(*given),
    )
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.out_of_reach.cache_clear()
    yield asked
    hub.out_of_reach.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (
            ["model.init=pretrained", "model.path=nobody/nothing"],
            "model.path = 'nobody/nothing'",
        ),
        (["model.tokenizer=nobody/nothing"], "model.tokenizer = 'nobody/nothing'"),
        (['data.paths="hub:nobody/nothing"'], 'data.paths = "hub:nobody/nothing"'),
    ],
)
def test_a_run_that_needs_the_hub_is_refused_at_once(
    monkeypatch,
    capsys,
    workplace,  # noqa: F811
    unreachable,
    arguments,
    key,
):
    from ringspan.train.config.load import load_config
    from ringspan.train.data.documents import scan_documents
    from ringspan.train.model import load_model_config, load_tokenizer

    if arguments[0] == "model.init=pretrained":
        text = (workplace / "config.toml").read_text()
        (workplace / "config.toml").write_text(
            text.split("[model]")[0] + "[data]" + text.split("[data]")[1]
        )
    config = load_config(workplace / "config.toml", arguments)
    with pytest.raises(ConfigError, match="the Hub is out of reach") as refused:
        model_config = load_model_config(config)
        if config.model.tokenizer == "train":
            scan_documents(config.data)
        load_tokenizer(config.model, model_config)
    # its own clients try again and again, for half a minute
    assert unreachable == [("127.0.0.1", 9)]
    assert str(refused.value).startswith(key) and "is neither in" in str(refused.value)


def test_a_plan_says_so_too(monkeypatch, capsys, unreachable):
    line = refusal(monkeypatch, capsys, "plan", "--model", "nobody/nothing")
    assert "the Hub is out of reach" in line and unreachable == [("127.0.0.1", 9)]


@pytest.mark.parametrize(
    "name",
    ["./models/mine", "/models/mine", "~/mine", "models/mine/again", "my models/mine"],
)
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(
    monkeypatch, capsys, name
):
    monkeypatch.setattr(hub, "out_of_reach", lambda: pytest.fail("asked the Hub"))
    assert "there is no such folder in" in refusal(
        monkeypatch, capsys, "plan", "--model", name
    )
    with (
        pytest.raises(ConfigError, match="there is no such folder in"),
        hub.from_hub("model.path", name),
    ):
        pass


def test_the_hub_is_not_asked_for_local_or_forbidden_models(
    monkeypatch, tmp_path, unreachable
):
    monkeypatch.setattr(hub, "out_of_reach", lambda: pytest.fail("asked the Hub"))
    with hub.from_hub("model.path", str(tmp_path)):
        assert not constants.HF_HUB_OFFLINE
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.out_of_reach.cache_clear()
    assert hub.out_of_reach() == "HF_HUB_OFFLINE is set"
    hub.out_of_reach.cache_clear()


def test_the_cache_alone_is_used_where_the_hub_is_out_of_reach(unreachable):
    with hub.from_hub("model.path", "nobody/nothing"):
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    with pytest.raises(KeyError), hub.from_hub("model.path", "nobody/nothing"):
        raise KeyError("what is in the cache is damaged")


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("two words", 9, "two words"),
        ("three\n  short words", 17, "three short words"),
        ("three short words", 16, "three short..."),
        ("three short, words", 16, "three short..."),
        ("unbreakable", 8, "unbre..."),
        ("", 8, ""),
    ],
)
def test_messages_end_after_a_word(text, limit, expected):
    assert shortened(text, limit) == expected
    assert len(shortened(text, limit)) <= limit
    assert one_line(ValueError(text), limit) == (expected or "ValueError")


def test_no_message_is_cut_by_its_characters():
    import re
    from pathlib import Path

    import ringspan

    for path in Path(ringspan.__file__).parent.rglob("*.py"):
        if path.name != "messages.py":
            assert not re.search(r"\[:\s*(160|[2-9]\d\d)\]", path.read_text()), (
                f"{path}: use core.messages.shortened"
            )
