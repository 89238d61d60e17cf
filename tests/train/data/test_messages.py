"""Keys of conversations: beside the messages, inside of them, and without a value, as the chat template gets them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ringspan.core.errors import ConfigError
from ringspan.train.config.data_table import DataConfig
from ringspan.train.data.messages import read_conversations
from ringspan.train.data.seen import SeenSequences
from tests.train.conversations import write_processor

PLAIN = "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}[A:{% generation %}{{ m['content'] }}]{% endgeneration %}"
    "{% else %}[{{ m['role'] }}:{{ m['content'] }}]{% endif %}{% endfor %}"
)
# As Qwen3 does, the thoughts of earlier answers are left out.
THINKING = MARKED.replace(
    "{{ m['content'] }}]{% endgeneration %}",
    "{% if loop.last and m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m['content'] }}]{% endgeneration %}",
)
CALLING = (
    "{% if tools %}<{{ tools | tojson }}>{% endif %}{% for d in documents or [] %}({{ d.text }}){% endfor %}"
    "{% if shouts is defined %}{{ shouts }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<{{ c['function'] | tojson }}>{% endfor %}]{% endfor %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {}},
    }
]
CALLS = [
    {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
]


def tokenizer(template: Any) -> Any:
    """A character for a token."""
    names = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
    backend = Tokenizer(
        models.WordLevel(
            {name: number for number, name in enumerate(names)}, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    made.chat_template = template
    return made


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def row(folder: Path, processor: Any, messages: Any, **beside: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"messages": messages, **beside}) + "\n")
    data = DataConfig(
        paths=(str(file),), messages="messages", sequence_length_tokens=300
    )
    return SeenSequences(
        read_conversations(data).examples, processor, sequence_length_tokens=300
    )[0]


def texts(folder: Path, template: Any, messages: Any, **beside: Any) -> tuple[str, str]:
    """What a row reads, and what it learns, with a dot for each token that is no target."""
    made = tokenizer(template)
    found = row(folder, made, messages, **beside)
    count = int(found["attention_mask"].sum())
    read = made.convert_ids_to_tokens(found["input_ids"][:count])
    targets = found["shift_labels"][: count - 1].tolist()
    return "".join(read), "".join(
        "." if t == -100 else made.convert_ids_to_tokens(t) for t in targets
    )


ASKED = [said("user", "q"), said("assistant", "a")]


@pytest.mark.parametrize(
    ("template", "beside", "given"),
    [
        (CALLING, {"tools": TOOLS}, {"tools": TOOLS}),
        (CALLING, {"tools": json.dumps(TOOLS)}, {"tools": TOOLS}),
        (CALLING, {"tools": [], "documents": None}, {}),
        (PLAIN, {"tools": [], "chat_template_kwargs": None}, {}),
        (
            CALLING,
            {"documents": [{"text": "t", "title": None}]},
            {"documents": [{"text": "t"}]},
        ),
        (
            CALLING,
            {"chat_template_kwargs": {"shouts": "!", "other": None}},
            {"shouts": "!"},
        ),
        ({"default": PLAIN, "tool_use": CALLING}, {"tools": TOOLS}, {"tools": TOOLS}),
    ],
)
def test_the_template_gets_what_a_row_has_beside_its_messages(
    tmp_path, template, beside, given
):
    expected = tokenizer(template).apply_chat_template(ASKED, tokenize=False, **given)
    assert texts(tmp_path, template, ASKED, **beside)[0] == expected


@pytest.mark.parametrize(
    ("template", "messages", "beside", "says"),
    [
        (
            PLAIN,
            ASKED,
            {"images": ["a.png"], "id": 7, "score": 0.5},
            "has images, score beside messages, which training does not read; take",
        ),
        (
            PLAIN,
            ASKED,
            {"tools": TOOLS},
            "has tools, which the chat template of model.tokenizer does not read; leave",
        ),
        (
            PLAIN,
            ASKED,
            {"chat_template_kwargs": {"enable_thinking": True}},
            "has enable_thinking, which the chat templ",
        ),
        (
            CALLING,
            ASKED,
            {"chat_template_kwargs": {"tokenize": False}},
            "tokenize in chat_template_kwargs is set by t",
        ),
        (
            CALLING,
            ASKED,
            {"chat_template_kwargs": 3},
            "chat_template_kwargs must be an object, got 3",
        ),
        (CALLING, ASKED, {"tools": "f("}, "tools is no JSON: "),
        (
            CALLING,
            ASKED,
            {"tools": ["f"]},
            r"tools must be a list of objects, got \[.f.\]",
        ),
        (
            PLAIN,
            [said("user", "q", mood="sad")],
            {},
            "has mood, which the chat template of model.tokenizer does not",
        ),
        (
            PLAIN,
            [said("assistant", None, tool_calls=CALLS)],
            {},
            "has tool_calls, which the chat template",
        ),
        (
            MARKED,
            [said("assistant", "a", reasoning="r")],
            {},
            "has reasoning, which the chat template",
        ),
        (
            PLAIN,
            [said("user", None)],
            {},
            "a message needs a role and content, or tool_calls, got",
        ),
        (
            CALLING,
            [said("assistant", None, tool_calls=[])],
            {},
            "a message needs a role and content, or tool_calls, got",
        ),
        (
            MARKED,
            [said("assistant", "a", weight=0.5)],
            {},
            "weight = 0.5 of a message: must be 0 or 1",
        ),
        (
            MARKED,
            [said("assistant", "a", train="no")],
            {},
            'train = "no" of a message: must be true or false',
        ),
        (
            MARKED,
            [said("user", "q"), said("assistant", "a", weight=0)],
            {},
            "weight = 0 or train = false leave none",
        ),
        (
            PLAIN,
            [said("user", [{"type": "text", "text": "q", "lang": "en"}])],
            {},
            "a part of text has lang, which",
        ),
    ],
)
def test_what_would_be_dropped_is_refused_by_name(
    tmp_path, template, messages, beside, says
):
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: .*{says}") as caught:
        texts(tmp_path, template, messages, **beside)
    assert "\n" not in str(caught.value)


def test_keys_that_only_name_a_row_are_passed_over(tmp_path):
    labels = {"id": 7, "source": {"site": "a"}, "url": "b", "created_at": None}
    plain, labelled = (
        texts(tmp_path, PLAIN, ASKED, **beside) for beside in ({}, labels)
    )
    assert plain == labelled


TWICE = [
    said("user", "q"),
    said("assistant", "aa"),
    said("user", "x"),
    said("assistant", "b"),
]


@pytest.mark.parametrize(
    ("template", "number", "keys", "learnt"),
    [
        (MARKED, 1, {}, ".aa].b]"),
        (MARKED, 1, {"weight": 1, "train": None}, ".aa].b]"),
        (MARKED, 1, {"weight": 0}, ".b]"),
        (MARKED, 3, {"train": False}, ".aa]."),
        (MARKED, 0, {"weight": 0}, ".aa].b]"),
        (PLAIN, 1, {"weight": 0}, "user:q].[user:x][assistant:b]"),
        (PLAIN, 3, {"train": False}, "user:q][assistant:aa][user:x]."),
        (PLAIN, 0, {"train": False}, ".[assistant:aa][user:x][assistant:b]"),
    ],
)
def test_tokens_of_messages_that_are_not_trained_are_no_targets(
    tmp_path, template, number, keys, learnt
):
    messages = [
        message | (keys if place == number else {})
        for place, message in enumerate(TWICE)
    ]
    read, found = texts(tmp_path, template, messages)
    assert read == tokenizer(template).apply_chat_template(TWICE, tokenize=False)
    assert re.sub(r"\.+", ".", found) == learnt


def test_messages_are_told_apart_without_their_thoughts(tmp_path):
    messages = [
        message | ({"reasoning_content": "t"} if message["role"] == "assistant" else {})
        for message in TWICE
    ]
    messages[1] |= {"weight": 0}
    read, learnt = texts(tmp_path, THINKING, messages)
    assert read.endswith("[A:aa][user:x][A:<t>b]") and learnt.strip(".") == "<t>b]"


def test_a_message_that_is_written_otherwise_later_is_refused(tmp_path):
    template = PLAIN.replace(
        "]{% endfor %}", "{% if loop.last %}!{% endif %}]{% endfor %}"
    )
    messages = [
        message | ({"train": False} if message["content"] == "aa" else {})
        for message in TWICE
    ]
    with pytest.raises(
        ConfigError,
        match=r"rows.jsonl:1: has weight = 0 or train = false, and the chat template writes",
    ):
        texts(tmp_path, template, messages)


def test_rows_of_datasets_read_as_those_they_were_made_of(tmp_path):
    """A table has every key in every row, without a value where it was not there."""
    rows = [
        {
            "tools": TOOLS,
            "messages": [
                said("user", "q"),
                {"role": "assistant", "tool_calls": CALLS},
                said("tool", "7"),
            ],
        },
        {"messages": [said("user", "q")]},
        {
            "messages": [
                said(
                    "assistant",
                    None,
                    tool_calls=[{"function": {"name": "g", "arguments": {"y": 2}}}],
                )
            ]
        },
    ]
    table = Dataset.from_list(rows)
    assert "arguments" in str(table.features) and table[1]["tools"] is None
    table.to_json(tmp_path / "table.jsonl")
    (tmp_path / "plain.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    found = {}
    for name in ("table", "plain"):
        data = DataConfig(
            paths=(str(tmp_path / f"{name}.jsonl"),),
            messages="messages",
            sequence_length_tokens=300,
        )
        found[name] = SeenSequences(
            read_conversations(data).examples,
            tokenizer(CALLING),
            sequence_length_tokens=300,
        )
    for number in range(3):
        left, right = (each[number]["input_ids"] for each in found.values())
        assert left.equal(right), number


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (CALLING, None),  # a template that asks for it
        (PLAIN + "{% if tool_calls %}{% endif %}", ""),  # one that would write "None"
        # one that fails
        (
            PLAIN.replace("m['content']", "m['content'] + '.'")
            + "{% if tool_calls %}{% endif %}",
            "",
        ),
        (
            PLAIN.replace("m['content']", "m['content'] is none")
            + "{% if tool_calls %}{% endif %}",
            None,
        ),
    ],
)
def test_a_missing_content_is_given_as_templates_take_it(tmp_path, template, content):
    expected = [said("user", "q"), said("assistant", content, tool_calls=CALLS)]
    written = tokenizer(template).apply_chat_template(expected, tokenize=False)
    assert (
        texts(
            tmp_path,
            template,
            [said("user", "q"), said("assistant", None, tool_calls=CALLS)],
        )[0]
        == written
    )


def test_a_processor_takes_a_message_of_calls_alone(tmp_path):
    processor = write_processor(tmp_path / "processor")
    processor.chat_template += "{% for m in messages %}{% for c in m.tool_calls or [] %}red{% endfor %}{% endfor %}"
    found = row(
        tmp_path,
        processor,
        [said("user", "blue"), {"role": "assistant", "tool_calls": CALLS}],
    )
    count = int(found["attention_mask"].sum())
    assert (
        processor.tokenizer.decode(found["input_ids"][:count])
        == "user: blue assistant: <end> red"
    )


def test_a_folder_without_conversations_names_what_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    data = DataConfig(
        paths=(str(tmp_path),), messages="messages", sequence_length_tokens=300
    )
    with pytest.raises(
        ConfigError,
        match=r"no file in it ends in .jsonl, .json; give .jsonl files with conversations",
    ):
        read_conversations(data)
    for key in ("extensions", "hub_split"):
        with pytest.raises(
            ValidationError,
            match=rf"data.{key}: is of text, and data.messages reads conversations",
        ):
            DataConfig.model_validate(
                dict(data) | {key: (".txt",) if key == "extensions" else "test"}
            )
