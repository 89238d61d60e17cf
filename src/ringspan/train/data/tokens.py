"""Text -> tokens: our tokenizer, each document's tokens, and all as one stream in memory-mapped Arrow files."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ringspan.core.errors import ConfigError
from ringspan.train.config.model_table import MIN_VOCAB_SIZE
from ringspan.train.data.documents import column_of, rows_per_batch

END_OF_TEXT = "<|endoftext|>"
# Part of each cache key: raise it when the same documents would give other tokens.
_CACHE_VERSION = 1


def train_tokenizer(documents: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a deterministic byte-level BPE tokenizer of at most `vocab_size` tokens; `<|endoftext|>` (id 0) pads."""
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
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def tokenize(documents: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Tokenize documents into memory-mapped rows of "input_ids" (int32).

    With the tokenizer's special tokens, as for inference, and its end-of-text token, if any, after each. Special tokens
    spelt out become these tokens. A document is tokenized whole, whatever model_max_length says: about 150 bytes of
    memory per byte of the longest one, or of 8 MiB of shorter ones.
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
    """Texts -> ids, pickled as a digest of the tokenizer's behaviour, which names `Dataset.map`'s cache file.

    A tokenizer's own pickle changes on first use and would miss the cache.
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
        state = {
            **json.loads(tokenizer.backend_tokenizer.to_str()),
            "truncation": None,
            "padding": None,
        }
    else:
        state = {
            "name": tokenizer.name_or_path,
            "vocabulary": sorted(tokenizer.get_vocab().items()),
        }
    described = [
        type(tokenizer).__qualname__,
        tokenizer.eos_token_id,
        str(tokenizer.special_tokens_map),
        state,
    ]
    return hashlib.sha256(
        json.dumps(described, sort_keys=True, default=str).encode()
    ).hexdigest()


def refuse_unknown_tokens(
    stream: "TokenStream", tokenizer: PreTrainedTokenizerBase, vocabulary: int
) -> None:
    """Raise ConfigError if the text has a token, added to the tokenizer, that the model's vocabulary lacks."""
    if max(tokenizer.added_tokens_decoder, default=-1) < vocabulary:
        return
    largest = stream.largest()
    if largest >= vocabulary:
        raise ConfigError(
            f"the text has {str(tokenizer.convert_ids_to_tokens(largest))!r}, token {largest} of model.tokenizer, and "
            f"the model has only {vocabulary}; take it out of the text, or train a model that has it"
        )


class TokenStream:
    """All documents' tokens: `read(start, stop)` anywhere without loading the rest."""

    def __init__(self, tokens: Dataset) -> None:
        chunks = [
            chunk for chunk in column_of(tokens, "input_ids").chunks if len(chunk)
        ]
        # Views of the memory-mapped file, not copies. An Arrow chunk is many documents back to back.
        self._values = [
            chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks
        ]
        self._chunk_starts = starts([len(values) for values in self._values])
        lengths = [
            chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks
        ]
        self.document_starts = starts(np.concatenate(lengths) if lengths else [])
        """First position of each document, then the length of the stream. int64, (num_documents + 1,)."""

    def __len__(self) -> int:
        return int(self._chunk_starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    def largest(self) -> int:
        return max((int(values.max()) for values in self._values), default=-1)

    def digest(self) -> str:
        digest = hashlib.sha256(self.document_starts.tobytes())
        for values in self._values:
            digest.update(memoryview(values).cast("B"))
        return digest.hexdigest()

    def begins(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document starts in [start, stop), and that of the document that ``start`` cuts."""
        first, last = np.searchsorted(self.document_starts, [start + 1, stop])
        return np.concatenate([[start], self.document_starts[first:last]])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens [start, stop) of the stream as int64, joined from memory-mapped chunks."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(
                f"[{start}, {stop}) is not within a stream of {len(self)} tokens"
            )
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


def starts(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the starts of consecutive runs, and the end: [2, 3] -> [0, 2, 5]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
