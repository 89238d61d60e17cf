"""Text -> documents -> token stream -> training sequences of one length, in an order that is a function of the seed.

Documents and tokens live in Arrow files that are memory-mapped (Hugging Face `datasets`, its cache folder); in memory
are only the bounds of the documents and one permutation of the sequences.

S tokens of a sequence. A window is S + 1 neighbouring tokens: S inputs, and the S targets one position further on.
The next window starts at the last token of this one, so each token but the first is a target exactly once.
"""

import hashlib
import json
import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, SupportsIndex

import numpy as np
from datasets import Dataset, Features, List, Value
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ringspan.core.errors import ConfigError
from ringspan.torch.data.batch import IGNORED
from ringspan.train.config.tables import MIN_VOCAB_SIZE, DataConfig, DocumentsName, TrainConfig
from ringspan.train.data.documents import DocumentScan, column_of, rows_per_batch, scan_documents

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
# With fewer documents than this, the last ones could be most of the text: the tail of the stream is held out instead.
MIN_DOCUMENTS_TO_SPLIT = 20
# Part of each cache key: raise it when the same documents would give other tokens.
_CACHE_VERSION = 1

# --- tokens ---


def train_tokenizer(documents: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens; any text round-trips; training is deterministic.

    `<|endoftext|>` (id 0) closes a document and pads. A short text yields fewer tokens than asked for.

    Raises:
        ConfigError: vocab_size is below 257, the bytes and `<|endoftext|>`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"model.config.vocab_size = {vocab_size}: a byte-level tokenizer needs at least {MIN_VOCAB_SIZE} tokens; "
            "raise it"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    batches: Any = documents.iter(batch_size=rows_per_batch(documents))
    tokenizer.train_from_iterator((batch["text"] for batch in batches), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )


def tokenize(documents: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The tokens of each document: memory-mapped rows with the one column "input_ids" (int32).

    The tokenizer adds its own special tokens, as it does for inference (Llama: a begin-of-text token), and each
    document ends with the end-of-text token where the tokenizer has one. Special tokens that are spelt out in the
    text become these tokens. A document is tokenized as a whole, whatever the tokenizer's model_max_length; that
    takes about 150 bytes of memory a byte of text, for the longest document or for 8 MiB of shorter ones.
    """
    rows = rows_per_batch(documents)
    return documents.map(
        _Encoder(tokenizer),
        batched=True,
        batch_size=rows,
        writer_batch_size=rows,
        remove_columns=documents.column_names,
        features=Features({"input_ids": List(Value("int32"))}),
        desc="Tokenizing",
    )


class _Encoder:
    """Texts -> token ids, for `Dataset.map`, which names its cache file after the pickle of this object.

    Its pickle is only a digest of what the tokenizer does: a tokenizer's own pickle changes when it is first used, so
    that a second process, or a second run, would miss the cache.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._digest = _digest(tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {"digest": self._digest, "version": _CACHE_VERSION}

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = self._tokenizer(
            batch["text"],
            return_attention_mask=False,
            return_token_type_ids=False,
            truncation=False,
            verbose=False,  # no warning about documents longer than model_max_length
        )
        end = self._tokenizer.eos_token_id
        if end is not None:
            for tokens in encoded["input_ids"]:
                if not tokens or tokens[-1] != end:
                    tokens.append(end)
        return {"input_ids": encoded["input_ids"]}


def _digest(tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # Truncation and padding are the state that a call leaves behind.
        state = {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    else:
        state = {"name": tokenizer.name_or_path, "vocabulary": sorted(tokenizer.get_vocab().items())}
    described = [type(tokenizer).__qualname__, tokenizer.eos_token_id, str(tokenizer.special_tokens_map), state]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


class TokenStream:
    """All documents' tokens one after the other: `read(start, stop)` at any position, without loading the rest."""

    def __init__(self, tokens: Dataset) -> None:
        """Wrap the result of `tokenize`."""
        chunks = [chunk for chunk in column_of(tokens, "input_ids").chunks if len(chunk)]
        # Views of the memory-mapped file, not copies. An Arrow chunk is many documents back to back.
        self._values = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks]
        self._chunk_starts = _starts([len(values) for values in self._values])
        lengths = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
        self.document_starts = _starts(np.concatenate(lengths) if lengths else [])
        """First position of each document, then the length of the stream. int64, (num_documents + 1,)."""

    def __len__(self) -> int:
        return int(self._chunk_starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    def digest(self) -> str:
        """SHA-256 of all tokens and of where documents begin, as hexadecimal digits: a pass over the mapped file."""
        digest = hashlib.sha256(self.document_starts.tobytes())
        for values in self._values:
            digest.update(memoryview(values).cast("B"))
        return digest.hexdigest()

    def begins(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents begin in [start, stop), the one that ``start`` cuts with it."""
        first, last = np.searchsorted(self.document_starts, [start + 1, stop])
        return np.concatenate([[start], self.document_starts[first:last]])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens at positions [start, stop). int64, (stop - start,)."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"[{start}, {stop}) is not within a stream of {len(self)} tokens")
        out = np.empty(stop - start, np.int64)
        chunk = int(np.searchsorted(self._chunk_starts, start, side="right")) - 1
        position = start
        while position < stop:
            first = int(self._chunk_starts[chunk])
            values = self._values[chunk][position - first : stop - first]
            out[position - start : position - start + len(values)] = values
            position += len(values)
            chunk += 1
        return out


def _starts(lengths: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


# --- sequences ---


class TokenSequences:
    """The training sequences in a part of a stream, computed on access.

    ``sequences[i]`` is ``{"input_ids": (S,), "shift_labels": (S,)}``, int64: shift_labels[j] is the token after
    input_ids[j], or -100 where there is none (transformers' name for labels that are already shifted).

    "pack": windows over the whole part; what does not fill a window is dropped. "separate": the same windows, with
    ``"position_ids": (S,)`` that begin at 0 with the window and with each document in it, whose last token has no
    target. "cut": windows over each document; its last window is shorter and padded on the right; a document of one
    token has no target and is dropped.
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
        """Sequences over positions [start, stop) of the stream; a document that crosses the bounds is cut there."""
        self.sequence_length_tokens = sequence_length_tokens
        self.num_tokens = stop - start
        """Tokens in the part."""
        self._stream = stream
        self._pad_token_id = pad_token_id
        self._are_separate = documents == "separate"
        self._piece_starts = stream.begins(start, stop) if documents == "cut" else np.array([start])
        self._piece_stops = np.append(self._piece_starts[1:], stop)
        num_targets = np.maximum(self._piece_stops - self._piece_starts - 1, 0)
        whole, rest = np.divmod(num_targets, sequence_length_tokens)
        keeps_rest = documents == "cut"
        # _first_sequence[d] is the number of sequences before document d.
        self._first_sequence = _starts(whole + (rest > 0) if keeps_rest else whole)
        covered = num_targets if keeps_rest else whole * sequence_length_tokens
        kept = np.where(covered > 0, covered + 1, 0)
        self.num_dropped_tokens = int(self.num_tokens - kept.sum())
        """Tokens that are in no sequence: the tail of a packed part, or documents of one token."""

    @property
    def seen_tokens(self) -> float:
        """The length of one causal document in which a token sees as many keys, half of it, as it does here.

        ``sum(d^2) / sum(d)`` over the documents d of all sequences, where these are separate; else a sequence's length.
        """
        length, count = self.sequence_length_tokens, len(self)
        if not self._are_separate or not count:
            return float(length)
        start = int(self._piece_starts[0])
        stop = start + count * length
        edges = np.union1d(self._stream.begins(start, stop), np.arange(start, stop + 1, length))
        documents = np.diff(edges).astype(np.float64)
        return float((documents**2).sum() / documents.sum())

    def __len__(self) -> int:
        return int(self._first_sequence[-1])

    def __getitem__(self, index: SupportsIndex) -> dict[str, NDArray[np.int64]]:
        i = operator.index(index)
        i += len(self) if i < 0 else 0
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        piece = int(np.searchsorted(self._first_sequence, i, side="right")) - 1
        length = self.sequence_length_tokens
        start = int(self._piece_starts[piece]) + (i - int(self._first_sequence[piece])) * length
        window = self._stream.read(start, min(start + length + 1, int(self._piece_stops[piece])))
        input_ids = np.full(length, self._pad_token_id, np.int64)
        shift_labels = np.full(length, IGNORED, np.int64)
        # A short window keeps its last token as an input too, as an unsplit document would have it.
        input_ids[: len(window)] = window[:length]
        shift_labels[: len(window) - 1] = window[1:]
        sequence = {"input_ids": input_ids, "shift_labels": shift_labels}
        if self._are_separate:
            begins = self._stream.begins(start, start + length + 1) - start
            shift_labels[begins[1:] - 1] = IGNORED
            begins = begins[begins < length]
            sequence["position_ids"] = np.arange(length) - np.repeat(begins, np.diff(begins, append=length))
        return sequence


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run trains and is evaluated on; the two share no token."""

    train: TokenSequences
    eval: TokenSequences | None
    """None where data.eval_fraction is 0, or is not set and there is too little text."""
    stream: TokenStream
    """All tokens of both."""
    files: dict[str, tuple[int, int]]
    """Local files that were read, and the size and time of change of each."""
    num_documents: int
    num_tokens: int
    """Tokens of all documents, end-of-text tokens included."""
    num_skipped_files: int
    """Files and rows that are not UTF-8, null or empty."""
    num_dropped_tokens: int
    """Tokens that are in no sequence of train or eval."""


def build_data(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, scan: DocumentScan | None = None) -> Data:
    """Documents, tokens and sequences of a run, from a scan of its documents where there is one already.

    The first call fills the cache of `datasets`; later ones, in this or another process, only map its files. Of the
    processes of a node, let one call first.

    Raises:
        ConfigError: as `scan_documents`, or fewer tokens than one sequence takes.
    """
    settings = config.data
    scan = scan or scan_documents(settings)
    stream = TokenStream(tokenize(scan.documents, tokenizer))
    position = _eval_start(stream, settings)
    # What pads is never a target and never attended to by a target; any id does.
    pad: Any = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)

    def sequences(start: int, stop: int) -> TokenSequences:
        return TokenSequences(
            stream,
            start,
            stop,
            sequence_length_tokens=settings.sequence_length_tokens,
            documents=settings.documents,
            pad_token_id=pad,
        )

    train = sequences(0, position)
    evaluation = sequences(position, len(stream)) if settings.eval_fraction else None
    is_asked_for = "eval_fraction" in settings.model_fields_set or config.evaluation.every_steps
    if evaluation is not None and not (len(train) and len(evaluation)) and not is_asked_for:
        logger.warning("%d tokens are too few to hold some out: there is no evaluation", len(stream))
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
        num_dropped_tokens=train.num_dropped_tokens + (evaluation.num_dropped_tokens if evaluation else 0),
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
    """Position at which the held-out part starts; it reaches to the end of the stream.

    It is the last ceil(fraction x documents) documents, more where these are too short for one sequence. Where there
    are few documents it is the tail of the stream: ceil(fraction x sequences) sequences, or of "cut" that share of the
    tokens.
    """
    num_tokens, fraction = len(stream), config.eval_fraction
    if not fraction:
        return num_tokens
    if stream.num_documents >= MIN_DOCUMENTS_TO_SPLIT:
        latest = num_tokens - _min_tokens(config)
        starts = stream.document_starts
        by_fraction = starts[stream.num_documents - math.ceil(fraction * stream.num_documents)]
        by_length = starts[max(0, int(np.searchsorted(starts, latest, side="right")) - 1)]
        return int(min(by_fraction, by_length))
    if config.documents != "cut":
        length = config.sequence_length_tokens
        held_out = math.ceil(fraction * (num_tokens - 1) / length) * length + 1
    else:
        held_out = max(_min_tokens(config), math.ceil(fraction * num_tokens))
    return max(0, num_tokens - held_out)


def _min_tokens(config: DataConfig) -> int:
    """Fewest tokens that give a sequence."""
    return 2 if config.documents == "cut" else config.sequence_length_tokens + 1


# --- order ---


@dataclass(frozen=True)
class BatchOrder:
    """Which sequences each step, micro-step and replica takes: a function of the seed and the step alone.

    The sequences, permuted anew in each epoch, form one endless row; step t (from 0) takes the next G of it, where
    G = batch_size x accumulation_steps x replicate. How G is made up changes nothing in the row, so a run resumes
    exactly, on another number of replicas too. A batch that is larger than the data repeats sequences.

    A run that changed its G, or skipped data, has a `shift`: its step t takes what starts at shift + t x G.
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
                raise ConfigError(f"{name} = {getattr(self, name)}: an order of batches needs at least one")

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step, on all replicas and micro-steps."""
        return self.batch_size * self.accumulation_steps * self.replicate

    def place(self, step: int) -> int:
        """Sequences of the row that come before a step (from 0): the position in the data."""
        return self.shift + step * self.global_batch_size

    def step_indices(self, step: int) -> NDArray[np.int64]:
        """The sequences of a step. int64, (accumulation_steps, replicate, batch_size)."""
        if step < 0:
            raise IndexError(f"step {step}: steps count from 0")
        places = self.place(step) + np.arange(self.global_batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(places, self.num_sequences)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = _permutation(self.num_sequences, self.seed, int(epoch))[offsets[here]]
        return indices.reshape(self.accumulation_steps, self.replicate, self.batch_size)

    def indices(self, step: int, micro: int, replica: int) -> list[int]:
        """The `batch_size` sequences of one replica in one micro-step; replicas take neighbouring slices of it."""
        if not (0 <= micro < self.accumulation_steps and 0 <= replica < self.replicate):
            raise IndexError(
                f"micro-step {micro} of {self.accumulation_steps}, replica {replica} of {self.replicate}: from 0"
            )
        return self.step_indices(step)[micro, replica].tolist()


@lru_cache(maxsize=2)  # a step touches one epoch, or two at the seam
def _permutation(num_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # Sorted raw bits, not Generator.permutation: NumPy keeps the bit streams stable between versions, its methods not.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_sequences)
    permutation = np.argsort(keys, kind="stable")
    permutation.flags.writeable = False
    return permutation
