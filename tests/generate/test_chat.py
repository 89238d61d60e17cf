"""What a conversation reads next: what its template says, without a token that was read before."""

import os

import pytest
from transformers import AutoTokenizer

from ringspan.core.errors import ConfigError
from ringspan.generate.session import Conversation, Lines
from tests.cli.commands.test_generate import save_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}[assistant] "
    "{% endif %}"
)
FORGETFUL = "[{{ messages[-1].content }}]"


def talk(
    folder, template: str, reply: str
) -> tuple[bool, str, list[int], Conversation]:
    """A second question after a reply: whether it goes on, all text, and the tokens before."""
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.chat_template = template
    conversation = Conversation(tokenizer)
    assert conversation.ask("one")
    conversation.answered(tokenizer(reply).input_ids)
    before = list(conversation.ids)
    goes_on = conversation.ask("two")
    return goes_on, tokenizer.decode(conversation.ids), before, conversation


def test_a_template_continues_after_a_finished_or_cut_reply(tmp_path):
    for reply in ("yes<end>", "yes"):
        goes_on, text, before, conversation = talk(tmp_path, TEMPLATE, reply)
        assert goes_on and conversation.ids[: len(before)] == before
        assert text == "[user] one<end>[assistant] yes<end>[user] two<end>[assistant] "


def test_a_template_that_drops_what_was_said_begins_anew(tmp_path):
    goes_on, text, _, _ = talk(tmp_path, FORGETFUL, "yes<end>")
    assert not goes_on and text == "[two]"


def test_a_cached_text_stays_before_a_new_conversation(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = FORGETFUL
    conversation = Conversation(tokenizer, tokenizer("book ").input_ids)
    assert (
        conversation.ask("one") and tokenizer.decode(conversation.ids) == "book [one]"
    )
    conversation.answered(tokenizer("yes").input_ids)
    assert (
        not conversation.ask("two")
        and tokenizer.decode(conversation.ids) == "book [two]"
    )


@pytest.mark.parametrize("template", [None, TEMPLATE, FORGETFUL])
def test_a_refused_line_leaves_the_conversation_unchanged(tmp_path, template):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = template

    def refuse(ids: list[int]) -> None:
        raise ConfigError(f"{len(ids)} are too many")

    asked, other = Conversation(tokenizer), Conversation(tokenizer)
    for conversation in (asked, other):
        conversation.ask("one")
        conversation.answered(tokenizer("yes").input_ids)
    with pytest.raises(ConfigError, match="are too many"):
        asked.ask("no end of this", refuse)
    assert asked == other
    assert asked.ask("two") == other.ask("two") and asked.ids == other.ids


def test_lines_come_when_they_are_whole():
    reader, writer = os.pipe()
    lines = Lines(reader)
    os.write(writer, b"on")
    assert lines.next(0.01) == (None, False)
    os.write(writer, b"e\n\n two \nlast")
    assert [lines.next(1), lines.next(1), lines.next(0.01)] == [
        ("one", False),
        ("two", False),
        (None, False),
    ]
    os.close(writer)
    assert [lines.next(1), lines.next(1)] == [("last", False), (None, True)]
    os.close(reader)


def test_a_byte_order_mark_is_not_part_of_the_first_line():
    reader, writer = os.pipe()
    os.write(writer, "one\n".encode("utf-8-sig"))
    assert Lines(reader).next(1) == ("one", False)
    os.close(writer)
    os.close(reader)
