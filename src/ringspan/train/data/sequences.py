"""Token stream -> training sequences of S tokens, and held-out ones.

A window is S + 1 tokens: S inputs, and as targets those one later. Windows share one token, so each but the first is a
target once: 0..6 with S = 3 are inputs 0 1 2 with targets 1 2 3, then 3 4 5 with 4 5 6.
"""

import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ringspan.core.errors import ConfigError
from ringspan.torch.data.padding import IGNORED
from ringspan.train.config.data_table import DataConfig, DocumentsName
from ringspan.train.config.tables import TrainConfig
from ringspan.train.data.documents import DocumentScan, scan_documents
from ringspan.train.data.messages import Conversations, read_conversations
from ringspan.train.data.seen import SeenSequences
from ringspan.train.data.tokens import (
    TokenStream,
    refuse_unknown_tokens,
    starts,
    tokenize,
)

logger = logging.getLogger(__name__)

# The last of fewer documents could be most of the text: then the tail of the stream is held out instead.
MIN_DOCUMENTS_TO_SPLIT = 20


class TokenSequences:
    """Training sequences of a part of a stream, computed on access.

    ``sequences[i]`` is ``{"input_ids": (S,), "shift_labels": (S,)}``, int64; shift_labels[j] is the token after
    input_ids[j], or -100 if there is none. "pack": windows over the whole part, an incomplete one is dropped.
    "separate": the same with ``"position_ids": (S,)`` that restart at 0 with window and document, whose last token has
    no target. "cut": windows over each document, the last one padded on the right; a one-token document is dropped.
    """

    def __init__(
        self,
        stream: TokenStream,
        start: int,
        stop: int,
        *,
        sequence_length_tokens: int,
        documents: DocumentsName,
        pad_token_id: int,
    ) -> None:
        """Lay out sequences over positions [start, stop) of the stream; documents across the bounds are cut."""
        self.sequence_length_tokens = sequence_length_tokens
        self.num_tokens = stop - start  # tokens in the part
        self._stream = stream
        self._pad_token_id = pad_token_id
        self._are_separate = documents == "separate"
        self._piece_starts = (
            stream.begins(start, stop) if documents == "cut" else np.array([start])
        )
        self._piece_stops = np.append(self._piece_starts[1:], stop)
        num_targets = np.maximum(self._piece_stops - self._piece_starts - 1, 0)
        whole, rest = np.divmod(num_targets, sequence_length_tokens)
        keeps_rest = documents == "cut"
        # _first_sequence[d] is the number of sequences before document d.
        self._first_sequence = starts(whole + (rest > 0) if keeps_rest else whole)
        covered = num_targets if keeps_rest else whole * sequence_length_tokens
        kept = np.where(covered > 0, covered + 1, 0)
        self.num_dropped_tokens = int(self.num_tokens - kept.sum())
        """Tokens that are in no sequence: the tail of a packed part, or documents of one token."""

    @property
    def seen_tokens(self) -> float:
        """Return the length of a causal document with the same work per token.

        That is ``sum(d^2) / sum(d)`` over the lengths d of separate documents, otherwise the sequence length.
        """
        length, count = self.sequence_length_tokens, len(self)
        if not self._are_separate or not count:
            return float(length)
        start = int(self._piece_starts[0])
        stop = start + count * length
        edges = np.union1d(
            self._stream.begins(start, stop), np.arange(start, stop + 1, length)
        )
        documents = np.diff(edges).astype(np.float64)
        return float((documents**2).sum() / documents.sum())

    def pairs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the causal (query, key) pairs of some sequences, per document if separate; int64."""
        length = self.sequence_length_tokens
        if not self._are_separate:
            return np.full(indices.shape, length * (length + 1) // 2)
        found = np.empty_like(indices)
        for place, index in enumerate(indices.ravel().tolist()):
            start = int(self._piece_starts[0]) + index * length
            tokens = np.diff(
                np.append(self._stream.begins(start, start + length), start + length)
            )
            found.flat[place] = (tokens * (tokens + 1)).sum() // 2
        return found

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = [self[index] for index in indices]
        return {
            name: torch.stack([torch.from_numpy(row[name]) for row in rows])
            for name in rows[0]
        }

    def __len__(self) -> int:
        return int(self._first_sequence[-1])

    def __getitem__(self, index: SupportsIndex) -> dict[str, NDArray[np.int64]]:
        """Return one sequence: S ids, their next-token targets, and positions if documents are separate.

        Sequence i belongs to the piece whose first sequence is the last one not above i, and reads S + 1 tokens of it.
        """
        i = operator.index(index)
        i += len(self) if i < 0 else 0
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        piece = int(np.searchsorted(self._first_sequence, i, side="right")) - 1
        length = self.sequence_length_tokens
        start = (
            int(self._piece_starts[piece])
            + (i - int(self._first_sequence[piece])) * length
        )
        window = self._stream.read(
            start, min(start + length + 1, int(self._piece_stops[piece]))
        )
        input_ids = np.full(length, self._pad_token_id, np.int64)
        shift_labels = np.full(length, IGNORED, np.int64)
        # A short window keeps its last token as an input too, like a document that is not split.
        input_ids[: len(window)] = window[:length]
        shift_labels[: len(window) - 1] = window[1:]
        sequence = {"input_ids": input_ids, "shift_labels": shift_labels}
        if self._are_separate:
            begins = self._stream.begins(start, start + length + 1) - start
            shift_labels[begins[1:] - 1] = IGNORED
            begins = begins[begins < length]
            sequence["position_ids"] = np.arange(length) - np.repeat(
                begins, np.diff(begins, append=length)
            )
        return sequence


Sequences = TokenSequences | SeenSequences


@dataclass(frozen=True, kw_only=True)
class Data:
    """A run's training and evaluation data, which share no token."""

    train: Sequences
    # None if data.eval_fraction is 0, or is not set and there is too little text
    eval: Sequences | None
    stream: TokenStream | Conversations  # all tokens, or all conversations, of both
    files: dict[str, tuple[int, int]]  # local files read -> (size, modification time)
    num_documents: int
    num_tokens: int  # tokens of all documents with end-of-text tokens; for conversations, with padding
    num_skipped_files: int  # files and rows that are not UTF-8, null or empty
    num_dropped_tokens: int  # tokens in no sequence of train or eval


def build_seen(config: TrainConfig, processor: object) -> Data:
    """Build a run's sequences of conversations (data.messages); the last ones are held out."""
    settings, conversations = config.data, read_conversations(config.data)
    examples = conversations.examples
    if settings.shared_prefix and (
        seen := next((example for example in examples if example.media), None)
    ):
        raise ConfigError(
            f"data.shared_prefix = true: is for text, and {seen.place} has {seen.media[0]}; leave one out"
        )
    held_out = math.ceil(settings.eval_fraction * len(examples))
    if held_out == len(examples) or (
        len(examples) < MIN_DOCUMENTS_TO_SPLIT and not _asks_for_evaluation(config)
    ):
        held_out = 0
    if _asks_for_evaluation(config) and settings.eval_fraction and not held_out:
        raise ConfigError(
            f"data.eval_fraction = {settings.eval_fraction}: {len(examples)} conversation is too few to hold some out; "
            "add some, or set it to 0"
        )
    sequences = partial(
        SeenSequences,
        processor=processor,
        sequence_length_tokens=settings.sequence_length_tokens,
    )
    train = sequences(examples[: len(examples) - held_out])
    logger.info(
        "%d conversations: %d to train on, %d held out",
        len(examples),
        len(train),
        held_out,
    )
    return Data(
        train=train,
        eval=sequences(examples[len(train) :]) if held_out else None,
        stream=conversations,
        files=conversations.files,
        num_documents=len(examples),
        num_tokens=len(examples) * settings.sequence_length_tokens,
        num_skipped_files=0,
        num_dropped_tokens=0,
    )


def _asks_for_evaluation(config: TrainConfig) -> bool:
    return "eval_fraction" in config.data.model_fields_set or bool(
        config.evaluation.every_steps
    )


def build_data(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, scan: DocumentScan | None = None, *,
    vocabulary: int = 1 << 31,
) -> Data:  # fmt: skip
    """Build documents, tokens and sequences for a vocabulary; the first call fills `datasets`' cache."""
    settings = config.data
    scan = scan or scan_documents(settings)
    stream = TokenStream(tokenize(scan.documents, tokenizer))
    refuse_unknown_tokens(stream, tokenizer, vocabulary)
    position = _eval_start(stream, settings)
    # Padding is never a target and no target attends to it, so any id serves.
    ids: Any = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
    pad: int = next(i for i in ids if i is not None and i < vocabulary)
    shape: Any = {
        "sequence_length_tokens": settings.sequence_length_tokens,
        "documents": settings.documents,
    }
    sequences = partial(TokenSequences, stream, pad_token_id=pad, **shape)
    train = sequences(0, position)
    evaluation = sequences(position, len(stream)) if settings.eval_fraction else None
    if (
        evaluation is not None
        and not (len(train) and len(evaluation))
        and not _asks_for_evaluation(config)
    ):
        logger.warning(
            "%d tokens are too few to hold some out: there is no evaluation",
            len(stream),
        )
        train, evaluation = sequences(0, len(stream)), None
    if not len(train) or (evaluation is not None and not len(evaluation)):
        needed = f"{_min_tokens(settings)} tokens to train on"
        if evaluation is not None:
            needed += f" and {_min_tokens(settings)} to hold out (data.eval_fraction = {settings.eval_fraction})"
        raise ConfigError(
            f"data.sequence_length_tokens = {settings.sequence_length_tokens}: needs {needed}, but there are "
            f"{len(stream)} in {stream.num_documents} documents; add text, shorten the sequence or hold out less"
        )
    data = Data(
        train=train,
        eval=evaluation,
        stream=stream,
        files=scan.files,
        num_documents=stream.num_documents,
        num_tokens=len(stream),
        num_skipped_files=scan.num_undecodable + scan.num_empty,
        num_dropped_tokens=train.num_dropped_tokens
        + (evaluation.num_dropped_tokens if evaluation else 0),
    )
    logger.info(
        "%d documents, %d tokens: %d sequences to train on, %d held out; %d tokens fill no sequence",
        data.num_documents,
        data.num_tokens,
        len(train),
        len(evaluation or ()),
        data.num_dropped_tokens,
    )
    return data


def _eval_start(stream: TokenStream, config: DataConfig) -> int:
    """Return the position at which the held-out tail of the stream starts.

    It holds the last ceil(fraction x documents) documents, or more if these are too short for a sequence. Of few
    documents it holds ceil(fraction x sequences) sequences, or for "cut" that share of the tokens.
    """
    num_tokens, fraction = len(stream), config.eval_fraction
    if not fraction:
        return num_tokens
    if stream.num_documents >= MIN_DOCUMENTS_TO_SPLIT:
        latest = num_tokens - _min_tokens(config)
        first = stream.document_starts
        by_fraction = first[
            stream.num_documents - math.ceil(fraction * stream.num_documents)
        ]
        by_length = first[max(0, int(np.searchsorted(first, latest, side="right")) - 1)]
        return int(min(by_fraction, by_length))
    if config.documents != "cut":
        length = config.sequence_length_tokens
        held_out = math.ceil(fraction * (num_tokens - 1) / length) * length + 1
    else:
        held_out = max(_min_tokens(config), math.ceil(fraction * num_tokens))
    return max(0, num_tokens - held_out)


def _min_tokens(config: DataConfig) -> int:
    return 2 if config.documents == "cut" else config.sequence_length_tokens + 1


@dataclass(frozen=True)
class BatchOrder:
    """Sequences of each step, micro-step and replica: a function of seed and step only.

    Sequences, permuted again each epoch, form an endless row; step t (from 0) takes G = batch_size x accumulation_steps
    x replicate from shift + t x G. Only G matters, so a run resumes exactly on other replicas; `shift` is 0 until a run
    changes its G or skips data. A batch larger than the data repeats sequences.
    """

    num_sequences: int
    seed: int
    batch_size: int
    accumulation_steps: int
    replicate: int
    shift: int = 0

    def __post_init__(self) -> None:
        for name in ("num_sequences", "batch_size", "accumulation_steps", "replicate"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}: an order of batches needs at least one"
                )

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.accumulation_steps * self.replicate

    def place(self, step: int) -> int:
        return self.shift + step * self.global_batch_size

    def step_indices(self, step: int) -> NDArray[np.int64]:
        """Return a step's sequences. int64, (accumulation_steps, replicate, batch_size)."""
        if step < 0:
            raise IndexError(f"step {step}: steps count from 0")
        places = self.place(step) + np.arange(self.global_batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(places, self.num_sequences)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = _permutation(self.num_sequences, self.seed, int(epoch))[
                offsets[here]
            ]
        return indices.reshape(self.accumulation_steps, self.replicate, self.batch_size)


@lru_cache(maxsize=2)  # a step touches one epoch, or two at the seam
def _permutation(num_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # NumPy keeps the bit streams stable between versions, but not the results of Generator.permutation.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(
        num_sequences
    )
    permutation = np.argsort(keys, kind="stable")
    permutation.flags.writeable = False
    return permutation
