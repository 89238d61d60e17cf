"""Conversations with images, videos and sound -> sequences of S tokens, by transformers' processor, on access.

Padded on the right. Every rank of a ring makes a step's pixels, then moves its share to its device.
"""

import copy
import operator
import re
from collections.abc import Sequence
from typing import Any, Final, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import refused
from ringspan.torch.data.batch import IGNORED
from ringspan.torch.data.media import MEDIA as INPUTS
from ringspan.torch.data.media import TOKEN_TYPES
from ringspan.train.data.messages import MEDIA, Example

VIDEO_REMEDY: Final = (
    "processors of video take torchvision, of the release that fits this torch, and read files with torchcodec: pip "
    "install torchvision torchcodec"
)
# As transformers looks for it, and Jinja's other way to keep the space before.
_ANSWER: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class SeenSequences:
    """Training sequences of conversations.

    ``sequences[i]``: ``input_ids``, ``attention_mask``, ``shift_labels``, each (S,), and the processor's tensors for
    media. Targets are the assistant's tokens if the chat template marks them (``{% generation %}``), else all but
    images'.
    """

    def __init__(self, examples: Sequence[Example], processor: Any, *, sequence_length_tokens: int) -> None:
        self.sequence_length_tokens = sequence_length_tokens
        self._examples, self._processor = examples, processor
        tokenizer = getattr(processor, "tokenizer", processor)
        self._sees_nothing = tokenizer is processor  # of a model of text
        ids = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
        self._pad: int = next(i for i in ids if i is not None)
        named = (getattr(processor, f"{kind}_token_id", None) for kind in MEDIA)
        self._placeholders = torch.tensor([token for token in named if isinstance(token, int)])
        template = getattr(processor, "chat_template", "")
        if isinstance(template, dict):  # of several, by their names, the processor takes this one
            template = template.get("default", "")
        self._marks_answers = _ANSWER.search(template) is not None

    @property
    def seen_tokens(self) -> float:
        """Return the length of one causal document with as many keys per token; padding counts."""
        return float(self.sequence_length_tokens)

    def pairs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        length = self.sequence_length_tokens
        return np.full(indices.shape, length * (length + 1) // 2)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Tensor]:
        example = self._examples[operator.index(index)]
        made = self._processed(example)
        tokens, length = made["input_ids"][0], self.sequence_length_tokens
        if len(tokens) > length:
            raise ConfigError(
                f"data.sequence_length_tokens = {length}: {example.place} makes {len(tokens)} tokens, with those of "
                "its images; raise it, or shorten the example"
            )
        targets = tokens.masked_fill(torch.isin(tokens, self._placeholders), IGNORED)
        if self._marks_answers:
            targets = tokens.masked_fill(torch.as_tensor(made["assistant_masks"]).view(-1) == 0, IGNORED)
        if bool((targets[1:] == IGNORED).all()):
            why = "the chat template marks no answer in it" if self._marks_answers else "it has only images, no text"
            raise ConfigError(f"{example.place}: has no target: {why}; correct it, or leave it out")
        sequence = {
            "input_ids": _padded(tokens, length, self._pad),
            "attention_mask": _padded(torch.ones_like(tokens), length, 0),
            "shift_labels": _padded(targets[1:], length, IGNORED),
        }
        for name in INPUTS & set(made):
            value = torch.as_tensor(made[name])
            sequence[name] = _padded(value[0], length, 0) if name in TOKEN_TYPES else value
        return sequence

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = [self[index] for index in indices]
        found: dict[str, Tensor] = {}
        for name in {name: None for row in rows for name in row}:
            parts = [row[name] for row in rows if name in row]
            if parts[0].ndim == 1 and len(parts[0]) == self.sequence_length_tokens and name not in INPUTS:
                found[name] = torch.stack(parts)
            elif name in TOKEN_TYPES:
                found[name] = torch.stack([row.get(name, torch.zeros_like(rows[0]["input_ids"])) for row in rows])
            elif len({part.shape[1:] for part in parts}) > 1:
                places = ", ".join(self._examples[index].place for index in indices)
                raise ConfigError(
                    f"optimizer.batch_size: {name} of {places} have different shapes "
                    f"({', '.join(str(tuple(part.shape)) for part in parts)}); use a batch size of 1"
                )
            else:
                found[name] = torch.cat(parts)
        return found

    def _processed(self, example: Example) -> dict[str, Any]:
        messages = copy.deepcopy(example.messages)  # which some versions of transformers change
        for part in (part for message in messages for part in message["content"]):
            if part["type"] == "video" and isinstance(part["video"], list):
                part["video"] = _frames(part["video"], example.place)
        if self._sees_nothing:
            if example.media:
                raise ConfigError(
                    f"{example.place}: {example.media[0]} needs a processor in the folder of model.tokenizer"
                )
            for message in messages:
                message["content"] = "".join(part["text"] for part in message["content"])
        options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        if self._marks_answers:
            options["return_assistant_tokens_mask"] = True
        where = f"{example.place}: {type(self._processor).__name__}"
        with (
            # Of any processor and template: a size that it refuses, a file that is no image.
            refused(f"{where} refuses it", Exception, remedy="; correct the example"),
            refused(f"{where} needs a package that is missing", ImportError, remedy=f"; {VIDEO_REMEDY}"),
        ):
            made = dict(self._processor.apply_chat_template([messages], **options))
        if unknown := sorted(set(made) - INPUTS - {"input_ids", "attention_mask", "assistant_masks"}):
            raise ConfigError(f"{where} makes {', '.join(unknown)}, which rs.shard_batch does not take")
        return made


def _frames(names: list[str], place: str) -> NDArray[np.uint8]:
    from PIL import Image

    with refused(f"{place}: a frame cannot be read", OSError, remedy="; repair it"):
        frames = [np.asarray(Image.open(name).convert("RGB")) for name in names]
    if len({frame.shape for frame in frames}) > 1:
        raise ConfigError(f"{place}: the frames of its video have different sizes; scale them to one")
    return np.stack(frames)


def _padded(values: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values.long(), (0, length - len(values)), value=value)
