"""Conversations with images, videos and sound -> sequences of S tokens, by transformers' processor, on access.

Padded on the right. Every rank of a ring makes a step's pixels, then moves its share to its device.
"""

import copy
import inspect
import operator
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import refused
from ringspan.generate.chat_template import reads, template_of
from ringspan.torch.data.media.inputs import MEDIA as INPUTS
from ringspan.torch.data.media.inputs import TOKEN_TYPES
from ringspan.torch.data.padding import IGNORED
from ringspan.train.data.messages import MEDIA, Example

VIDEO_REMEDY: Final = (
    "processors of video take torchvision, of the release that fits this torch, and read files with torchcodec: pip "
    "install torchvision torchcodec"
)
# The tag as transformers looks for it, and with Jinja's other sign for whitespace.
_ANSWER: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ASKING: Final = ("system", "developer", "user", "tool")  # roles without answers
# Keys of a message that every template may leave out.
_IDENTITIES: Final = {
    "role",
    "content",
    "name",
    "tool_call_id",
}
# Templates are free to read a reasoning under any of these names.
_REASONING: Final = (
    "reasoning_content",
    "thinking",
    "reasoning",
)


class SeenSequences:
    """Training sequences of conversations.

    ``sequences[i]``: ``input_ids``, ``attention_mask``, ``shift_labels``, each (S,), and the processor's tensors for
    media. Targets are the assistant's tokens if the chat template marks them (``{% generation %}``), else all but
    images'.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        processor: Any,
        *,
        sequence_length_tokens: int,
    ) -> None:
        """Refuse examples with keys that the chat template would not read; nothing is tokenized yet."""
        self.sequence_length_tokens = sequence_length_tokens
        self._examples, self._processor = examples, processor
        tokenizer = getattr(processor, "tokenizer", processor)
        # A model of text has only a tokenizer.
        self._sees_nothing = tokenizer is processor
        ids = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
        self._pad: int = next(i for i in ids if i is not None)
        named = (getattr(processor, f"{kind}_token_id", None) for kind in MEDIA)
        self._placeholders = torch.tensor(
            [token for token in named if isinstance(token, int)]
        )
        for example in examples:
            _refuse_unread(example, processor)

    @property
    def seen_tokens(self) -> float:
        """Return the length of a causal document with the same work per token; padding counts."""
        return float(self.sequence_length_tokens)

    def pairs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        length = self.sequence_length_tokens
        return np.full(indices.shape, length * (length + 1) // 2)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Tensor]:
        """Return one conversation as tensors: ids, mask and next-token targets (S,), and the processor's media tensors.

        Targets are the answers that the template marks, else all tokens but placeholders of media, less the messages
        left out of training. Raises ConfigError if the example is too long or has no target.
        """
        example = self._examples[operator.index(index)]
        marks_answers = _marks_answers(example, self._processor)
        messages = self._given(example)
        made = self._processed(example, messages)
        tokens, length = made["input_ids"][0], self.sequence_length_tokens
        if len(tokens) > length:
            raise ConfigError(
                f"data.sequence_length_tokens = {length}: {example.place} makes {len(tokens)} tokens, with those of "
                "its images; raise it, or shorten the example"
            )
        targets = tokens.masked_fill(torch.isin(tokens, self._placeholders), IGNORED)
        if marks_answers:
            targets = tokens.masked_fill(_is_answer(made) == 0, IGNORED)
        why = (
            "the chat template marks no answer in it"
            if marks_answers
            else "it has only images, no text"
        )
        if example.untrained and not bool((targets[1:] == IGNORED).all()):
            why = "weight = 0 or train = false leave none in its messages"
            for start, stop in self._untrained(example, messages, made):
                targets[start:stop] = IGNORED
        if bool((targets[1:] == IGNORED).all()):
            raise ConfigError(
                f"{example.place}: has no target: {why}; correct it, or leave it out"
            )
        sequence = {
            "input_ids": _padded(tokens, length, self._pad),
            "attention_mask": _padded(torch.ones_like(tokens), length, 0),
            "shift_labels": _padded(targets[1:], length, IGNORED),
        }
        for name in INPUTS & set(made):
            value = torch.as_tensor(made[name])
            sequence[name] = (
                _padded(value[0], length, 0) if name in TOKEN_TYPES else value
            )
        return sequence

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return several sequences as a batch: text is stacked (B, S), media tensors are concatenated.

        Rows without media have token types 0.
        """
        rows = [self[index] for index in indices]
        found: dict[str, Tensor] = {}
        for name in {name: None for row in rows for name in row}:
            parts = [row[name] for row in rows if name in row]
            if (
                parts[0].ndim == 1
                and len(parts[0]) == self.sequence_length_tokens
                and name not in INPUTS
            ):
                found[name] = torch.stack(parts)
            elif name in TOKEN_TYPES:
                found[name] = torch.stack(
                    [
                        row.get(name, torch.zeros_like(rows[0]["input_ids"]))
                        for row in rows
                    ]
                )
            elif len({part.shape[1:] for part in parts}) > 1:
                places = ", ".join(self._examples[index].place for index in indices)
                raise ConfigError(
                    f"optimizer.batch_size: {name} of {places} have different shapes "
                    f"({', '.join(str(tuple(part.shape)) for part in parts)}); use a batch size of 1"
                )
            else:
                found[name] = torch.cat(parts)
        return found

    def _given(self, example: Example) -> list[dict[str, Any]]:
        """Return a copy of the messages for the processor: videos as frames, or contents as text for a tokenizer."""
        # A copy, because some versions of transformers change the messages.
        messages = copy.deepcopy(example.messages)
        if self._sees_nothing and example.media:
            raise ConfigError(
                f"{example.place}: {example.media[0]} needs a processor in the folder of model.tokenizer"
            )
        for message in messages:
            content = message.get("content")
            if self._sees_nothing:
                if content is not None:
                    message["content"] = "".join(part["text"] for part in content)
                continue
            message["content"] = content or []
            for part in message["content"]:
                if part["type"] == "video" and isinstance(part["video"], list):
                    part["video"] = _frames(part["video"], example.place)
        if self._sees_nothing and any(
            message.get("content") is None for message in messages
        ):
            return self._with_contents(example, messages)
        return messages

    def _with_contents(
        self, example: Example, messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Fill in empty contents if the template fails without them, or would write the word ``None``."""
        empty = [
            message | {"content": message.get("content") or ""} for message in messages
        ]
        options = example.beside | example.variables | {"tokenize": False}
        try:
            written = self._processor.apply_chat_template(messages, **options)
        except Exception:  # a template that needs a text
            return empty
        with refused(
            f"{example.place}: its chat template refuses it",
            Exception,
            remedy="; correct the example",
        ):
            other = self._processor.apply_chat_template(empty, **options)
        return empty if written.count("None") > other.count("None") else messages

    def _processed(
        self, example: Example, messages: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the processor's tensors for a conversation, with a mask of answers if the template marks them.

        Its errors are raised as ConfigError that names the example.
        """
        options: dict[str, Any] = {
            "tokenize": True,
            "return_dict": True,
            "return_tensors": "pt",
        }
        if _marks_answers(example, self._processor):
            options["return_assistant_tokens_mask"] = True
        options |= example.beside | example.variables
        where = f"{example.place}: {type(self._processor).__name__}"
        with (
            # A processor or template may raise anything, for a size it cannot handle or a file that is not an image.
            refused(f"{where} refuses it", Exception, remedy="; correct the example"),
            refused(
                f"{where} needs a package that is missing",
                ImportError,
                remedy=f"; {VIDEO_REMEDY}",
            ),
        ):
            made = dict(
                self._processor.apply_chat_template(
                    [copy.deepcopy(messages)], **options
                )
            )
        if unknown := sorted(
            set(made) - INPUTS - {"input_ids", "attention_mask", "assistant_masks"}
        ):
            raise ConfigError(
                f"{where} makes {', '.join(unknown)}, which rs.shard_batch does not take"
            )
        return made

    def _untrained(
        self, example: Example, messages: list[dict[str, Any]], made: dict[str, Any]
    ) -> Iterator[tuple[int, int]]:
        """Yield the ranges of tokens [start, stop) that belong to messages left out of training."""
        find = (
            self._answers if _marks_answers(example, self._processor) else self._written
        )
        ranges = find(example, messages, made)
        if ranges is None:
            raise ConfigError(
                f"{example.place}: has weight = 0 or train = false, and the chat template writes a message otherwise "
                "once others follow, so that its tokens are not known; leave these keys out, or use another template"
            )
        for number in example.untrained:
            yield from ranges[number]

    def _answers(
        self, example: Example, messages: list[dict[str, Any]], made: dict[str, Any]
    ) -> list[list[tuple[int, int]]] | None:
        """Return the marked ranges of tokens of each message; None if they cannot be told apart.

        The conversation is processed up to each message in turn: the ranges that it adds are that message's.
        """
        runs, found, so_far = _runs(_is_answer(made)), list[list[tuple[int, int]]](), 0
        for number, message in enumerate(messages, start=1):
            count = so_far
            if message["role"] not in _ASKING:
                part = (
                    made
                    if number == len(messages)
                    else self._processed(example, messages[:number])
                )
                count = len(_runs(_is_answer(part)))
            found.append(runs[so_far:count])
            so_far = count
        return found if so_far == len(runs) else None

    def _written(
        self, example: Example, messages: list[dict[str, Any]], made: dict[str, Any]
    ) -> list[list[tuple[int, int]]] | None:
        """Return the range of tokens of each message left out of training, an empty list for others.

        It lies between the lengths of the conversation up to and after the message. None if the template writes a
        beginning of the conversation differently than the whole.
        """
        tokens, stops = (
            made["input_ids"][0],
            {0: 0, len(messages): len(made["input_ids"][0])},
        )
        for number in sorted(
            {each + more for each in example.untrained for more in (0, 1)}
            - stops.keys()
        ):
            part = self._processed(example, messages[:number])["input_ids"][0]
            if not torch.equal(part, tokens[: len(part)]):
                return None
            stops[number] = len(part)
        return [
            [(stops[number], stops[number + 1])] if number in example.untrained else []
            for number in range(len(messages))
        ]


def _marks_answers(example: Example, processor: Any) -> bool:
    return (
        _ANSWER.search(template_of(processor, has_tools="tools" in example.beside))
        is not None
    )


def _is_answer(made: dict[str, Any]) -> Tensor:
    return torch.as_tensor(made["assistant_masks"]).view(-1)


def _runs(mask: Tensor) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) of True in a mask."""
    edges = (
        torch.diff(
            mask.long(), prepend=torch.zeros(1).long(), append=torch.zeros(1).long()
        )
        .nonzero()
        .flatten()
    )
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _refuse_unread(example: Example, processor: Any) -> None:
    """Raise ConfigError that names the first key of an example that the chat template would not read."""
    template = template_of(processor, has_tools="tools" in example.beside)
    own = _own_arguments(type(processor))
    for name in example.variables:
        if name in own:
            raise ConfigError(
                f"{example.place}: {name} in chat_template_kwargs is set by training; leave it out"
            )
    in_messages = {
        name for message in example.messages for name in message
    } - _IDENTITIES
    for name in (*example.beside, *example.variables, *sorted(in_messages)):
        others = _REASONING if name in _REASONING else (name,)
        if not any(reads(template, each) for each in others):
            raise ConfigError(
                f"{example.place}: has {name}, which the chat template of model.tokenizer does not read; leave it out, "
                "or use a template that does"
            )


@lru_cache
def _own_arguments(kind: type) -> frozenset[str]:
    return frozenset(inspect.signature(kind.apply_chat_template).parameters) | {
        "messages"
    }


def _frames(names: list[str], place: str) -> NDArray[np.uint8]:
    from PIL import Image

    with refused(f"{place}: a frame cannot be read", OSError, remedy="; repair it"):
        frames = [np.asarray(Image.open(name).convert("RGB")) for name in names]
    if len({frame.shape for frame in frames}) > 1:
        raise ConfigError(
            f"{place}: the frames of its video have different sizes; scale them to one"
        )
    return np.stack(frames)


def _padded(values: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(
        values.long(), (0, length - len(values)), value=value
    )
