"""Training on conversations with images: the steps of one process on any ring, and a folder that a processor opens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from ringspan.core.errors import ConfigError
from ringspan.train.config.load import parse_config
from ringspan.train.config.tables import TrainConfig
from ringspan.train.data.messages import read_conversations
from ringspan.train.data.seen import SeenSequences
from ringspan.train.data.sequences import build_seen
from ringspan.train.job import prepare
from ringspan.train.model import build_model, load_model_config, load_processor
from ringspan.train.run_folder.record import recorded
from tests.train.conversations import (
    CONFIG,
    TEMPLATE,
    WORDS,
    write_conversations,
    write_processor,
)
from tests.train.runs import losses, plain_steps, train_on


def settings(folder: Path, name: str, **changes: Any) -> TrainConfig:
    data = {
        "paths": str(folder / "talk.jsonl"),
        "messages": "messages",
        "sequence_length_tokens": 29,
    }
    return parse_config(
        {
            "run": str(folder / name),
            "steps": 3,
            "model": {
                "init": "scratch",
                "config": CONFIG,
                "tokenizer": str(folder / "processor"),
            },
            "data": data | changes.pop("data", {}),
            "optimizer": {"warmup_steps": 1, "learning_rate": 1e-2, "batch_size": 2}
            | changes.pop("optimizer", {}),
            **changes,
        }
    )


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talk")
    write_processor(folder / "processor")
    write_conversations(folder, 24)
    return folder


def one_process(config: TrainConfig) -> list[float]:
    """The same steps by transformers' model and processor alone."""
    model_config = load_model_config(config)
    model = build_model(config.model, model_config, sees=True).train()
    return plain_steps(
        config,
        model,
        build_seen(config, load_processor(config.model, model_config)).train,
    )


def test_steps_equal_one_process_and_the_folder_opens(pool, talk):
    expected = one_process(
        settings(
            talk, "alone", data={"eval_fraction": 0.2}, optimizer={"batch_size": 4}
        )
    )
    assert expected[2] < expected[0]
    shared = {
        "mesh": {"ring": 2, "replicate": 2},
        "evaluation": {"every_steps": 3, "num_sequences": 3},
    }
    pool.run(train_on, 4, settings(talk, "ring", data={"eval_fraction": 0.2}, **shared))
    found = losses(talk / "ring")
    assert found[:3] == pytest.approx(expected, rel=5e-6) and len(found) == 4
    model = AutoModelForImageTextToText.from_pretrained(talk / "ring" / "model")
    processor = AutoProcessor.from_pretrained(talk / "ring" / "model")
    question = [
        {"role": "user", "content": [{"type": "image", "path": str(talk / "red.png")}]}
    ]
    asked = processor.apply_chat_template(
        question, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert model(**asked).logits.shape[1] == asked["input_ids"].shape[1]


def test_tokens_that_stand_for_images_are_no_targets(talk):
    config = settings(talk, "first")
    data = build_seen(config, AutoProcessor.from_pretrained(talk / "processor")).train
    row, image = data[2], CONFIG["image_token_id"]
    assert int((row["input_ids"] == image).sum()) == 8 and not bool(
        (row["shift_labels"] == image).any()
    )
    assert row["pixel_values"].shape == (2, 3, 8, 8)
    words = row["shift_labels"][row["shift_labels"] != -100].tolist()
    assert (
        " ".join(WORDS[word] for word in words)
        == "what colour is this assistant: blue and then red <end>"
    )


def marking(begin: str, end: str) -> str:
    """The template, with the words of answers between two tags."""
    part = "{{ part.text }} "
    return TEMPLATE.replace(
        part,
        f"{{% if message.role == 'assistant' %}}{begin}{part}{end}{{% else %}}{part}{{% endif %}}",
    )


MARKED = marking("{% generation %}", "{% endgeneration %}")
ANSWER = "blue and then red"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (MARKED, ANSWER),
        (marking("{%- generation -%}", "{%- endgeneration -%}"), ANSWER),
        (marking("{%generation%}", "{%endgeneration%}"), ANSWER),
        (marking("{%+ generation +%}", "{% endgeneration %}"), ANSWER),
        ({"default": MARKED, "tools": TEMPLATE}, ANSWER),
        (
            {"default": TEMPLATE, "tools": MARKED},
            f"what colour is this assistant: {ANSWER} <end>",
        ),
    ],
)
def test_answers_alone_are_targets_where_the_template_marks_them(
    talk, tmp_path, template, expected
):
    processor = write_processor(tmp_path / "marked", template)
    examples = read_conversations(settings(talk, "marked").data).examples
    row = SeenSequences(examples, processor, sequence_length_tokens=29)[2]
    targets = row["shift_labels"][row["shift_labels"] != -100]
    assert processor.tokenizer.decode(targets) == expected


def test_an_example_without_an_answer_is_refused(talk, tmp_path):
    write_row(tmp_path, "what colour is this")
    examples = read_conversations(
        settings(talk, "x", data={"paths": str(tmp_path / "one.jsonl")}).data
    ).examples
    sequences = SeenSequences(
        examples,
        write_processor(tmp_path / "marked", MARKED),
        sequence_length_tokens=29,
    )
    with pytest.raises(
        ConfigError,
        match=r"one.jsonl:2: has no target: the chat template marks no answer in it",
    ):
        sequences[0]


def test_what_ends_lines_elsewhere_is_text_in_a_line_of_json(talk, tmp_path):
    texts = ["red\u2028blue", "green\x85red", "blue"]
    rows = [
        json.dumps(
            {"messages": [{"role": "user", "content": text}]}, ensure_ascii=False
        )
        for text in texts
    ]
    (tmp_path / "talk.jsonl").write_text(
        "\r\n".join(rows), encoding="utf-8", newline=""
    )
    read = read_conversations(
        settings(talk, "x", data={"paths": str(tmp_path / "talk.jsonl")}).data
    )
    assert [
        example.messages[0]["content"][0]["text"] for example in read.examples
    ] == texts
    assert [example.place.rpartition(":")[2] for example in read.examples] == [
        "1",
        "2",
        "3",
    ]


def test_keys_without_a_value_are_as_if_they_were_not_there(talk, tmp_path):
    part = {
        "type": "image",
        "path": str(talk / "red.png"),
        "text": None,
        "fps": None,
        "url": None,
    }
    write_row(tmp_path, [part])
    read = read_conversations(
        settings(talk, "x", data={"paths": str(tmp_path / "one.jsonl")}).data
    )
    assert read.examples[0].messages[0]["content"] == [
        {"type": "image", "image": str(talk / "red.png")}
    ]


def write_row(folder: Path, content: Any, name: str = "messages") -> None:
    (folder / "one.jsonl").write_text(
        "\n" + json.dumps({name: [{"role": "user", "content": content}]}) + "\n"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "image", "path": "gone.png"}],
            r"one.jsonl:2: image 'gone.png' is no file",
        ),
        (
            [{"type": "image", "url": "https://x/y.png"}],
            r"one.jsonl:2: image .* is an address of the network",
        ),
        (
            [{"type": "smell", "path": "x"}],
            r"one.jsonl:2: a part must be text, image, video or audio",
        ),
        ([{"type": "image"}], r"one.jsonl:2: its image needs one path"),
        (
            [{"type": "video", "path": []}],
            r"one.jsonl:2: its video needs one path, or a list of frames",
        ),
        (
            [{"type": "video", "path": ["a.png", None]}],
            r"one.jsonl:2: its video needs one path.*got .*a.png., null",
        ),
        (
            [{"type": "image", "image": {"path": "a.png"}}],
            r"one.jsonl:2: its image needs one path, got",
        ),
        (
            [{"type": "image", "path": "a.png", "url": "b.png"}],
            r"one.jsonl:2: its image needs one path, got",
        ),
        (
            [{"type": "video", "path": ["a.png"], "fps": 2.0, "max_pixels": 99}],
            r"one.jsonl:2: its video has fps, max_pixels, which processors do not read there; leave",
        ),
        (3, r"one.jsonl:2: content must be text or a list of parts, got int"),
        (
            [{"type": "image", "path": "one.jsonl"}],
            r"one.jsonl:2: LlavaProcessor refuses it: ",
        ),
        (
            [{"type": "text", "text": "red " * 40}],
            r"one.jsonl:2 makes 42 tokens, with those of its images; raise it",
        ),
        (
            [{"type": "text", "text": "<image>"}],
            r"one.jsonl:2: LlavaProcessor refuses it: ",
        ),
        (
            [{"type": "video", "path": ["a.png", "b.png"]}],
            r"one.jsonl:2: the frames of its video have different sizes",
        ),
    ],
)
def test_what_is_wrong_with_an_example_is_one_line_that_names_it(
    talk, tmp_path, content, message
):
    for name, side in (("a", 8), ("b", 9)):
        Image.fromarray(np.zeros((side, side, 3), np.uint8)).save(
            tmp_path / f"{name}.png"
        )
    write_row(tmp_path, content)
    data = settings(talk, "bad", data={"paths": str(tmp_path / "one.jsonl")}).data
    processor = AutoProcessor.from_pretrained(talk / "processor")
    with pytest.raises(ConfigError, match=message) as caught:
        SeenSequences(
            read_conversations(data).examples, processor, sequence_length_tokens=29
        )[0]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": {"documents": "separate"}},
            "data.documents: is of text, and data.messages reads conversations",
        ),
        (
            {"data": {"messages": "talks"}},
            "data.messages = 'talks': .*talk.jsonl:1 has no list of messages",
        ),
        (
            {"data": {"paths": "hub:some/thing"}},
            "conversations .data.messages. are read from local files",
        ),
        (
            {"data": {"shared_prefix": True}},
            r"data.shared_prefix = true: is for text, and .*talk.jsonl:2 has .*\.png",
        ),
        (
            {"data": {"shared_prefix": True}, "optimizer": {"batch_size": 1}},
            "optimizer.batch_size = 1 has no second",
        ),
        (
            {"data": {"shared_prefix": True, "messages": None}},
            "is for conversations; set data.messages",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(talk, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_seen(settings(talk, "bad", **changes), None)


def test_a_folder_without_a_processor_is_refused(talk):
    config = settings(
        talk, "bad", model={"init": "scratch", "config": CONFIG, "tokenizer": "train"}
    )
    with pytest.raises(ConfigError, match="needs the processor of a model"):
        load_processor(config.model, load_model_config(config))


class Watching:
    """A processor that takes videos, which those of transformers do with torchvision alone."""

    chat_template = ""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def apply_chat_template(self, conversations: Any, **_: Any) -> dict[str, Any]:
        (message,) = conversations[0]
        video = message["content"][0]["video"]
        assert video.shape == (2, 10, 8, 3)
        pixels = torch.from_numpy(video)[None].float()
        return {"input_ids": torch.tensor([[4, 5]]), "pixel_values_videos": pixels}


def test_frames_of_a_video_become_one_array(talk, tmp_path):
    write_row(
        tmp_path,
        [{"type": "video", "path": [str(talk / "red.png"), str(talk / "blue.png")]}],
    )
    data = settings(talk, "frames", data={"paths": str(tmp_path / "one.jsonl")}).data
    processor = Watching(AutoProcessor.from_pretrained(talk / "processor").tokenizer)
    batch = SeenSequences(
        read_conversations(data).examples, processor, sequence_length_tokens=29
    ).batch([0])
    assert batch["pixel_values_videos"].shape == (1, 2, 10, 8, 3)
    assert int(batch["attention_mask"].sum()) == 2


def test_the_record_of_a_run_of_conversations_is_read_again(talk):
    config = settings(talk, "kept")
    assert recorded(config.model_dump(mode="json")) == (config, [])


SHARED = {"shared_prefix": False}, {"shared_prefix": True}


def tokens_of(_: Any, config: TrainConfig) -> int:
    return sum(part["input_ids"].numel() for part in prepare(config).batches.step(1)[1])


@pytest.mark.long
def test_steps_with_shared_beginnings_equal_rows(pool, talk):
    texts = ["what colour is this square", "this is a square and then", "this is"]
    rows = [
        [{"role": "user", "content": f"{text} {word}"}]
        for text in texts
        for word in ("red", "green", "blue a")
    ]
    (talk / "text.jsonl").write_text(
        "\n".join(json.dumps({"messages": messages}) for messages in rows)
    )
    data = {
        "paths": str(talk / "text.jsonl"),
        "eval_fraction": 0.0,
        "min_shared_tokens": 2,
    }
    sizes = {
        "optimizer": {"batch_size": 4, "accumulation_steps": 2},
        "mesh": {"ring": 2, "replicate": 2},
    }
    for name, one in zip(("rows", "tree"), SHARED, strict=True):
        pool.run(train_on, 4, settings(talk, name, data=data | one, **sizes))
    assert losses(talk / "tree") == pytest.approx(losses(talk / "rows"), rel=5e-6)
    rows, tree = (
        pool.run(tokens_of, 4, settings(talk, "x", data=data | one, **sizes))[0]
        for one in SHARED
    )
    assert tree < rows / 2
