"""Documents in tokens: each byte of a text is counted once, whatever a token is, and none is left out unsaid."""

from typing import Any

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from ringspan.core.errors import ConfigError
from ringspan.evaluate.perplexity import chosen
from ringspan.evaluate.prompts import long_documents
from ringspan.evaluate.settings import PERPLEXITY, EvalSettings

TEXT = "Größe, 漢字 and 👩‍🚀:  two spaces,\n\ttabs; done "


def of_bytes(trim_offsets: bool) -> Any:
    """Tokens of a byte each, those of one character with the same offsets; spaces trimmed from words or not."""
    vocabulary = {
        letter: number
        for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    vocabulary |= {"Ġa": 256, "<s>": 257}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim_offsets),
            processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 257)]
            ),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def of_pieces() -> Any:
    """Pieces after SentencePiece, with bytes of what is no piece; a prefix of its own, and letters made small."""
    vocabulary = {
        "<unk>": 0,
        "▁": 1,
        **{f"<0x{number:02X}>": number + 2 for number in range(256)},
    }
    vocabulary |= {
        letter: 258 + number
        for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")
    }
    tokenizer: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.NFKC()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def of_words() -> Any:
    """A token a word, none for what is between them."""
    tokenizer: Any = Tokenizer(
        models.WordLevel(vocab={"<unk>": 0, "and": 1}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize(
    "tokenizer", [of_bytes(True), of_bytes(False), of_pieces(), of_words()]
)
def test_the_bytes_of_all_tokens_are_those_of_the_text(tokenizer):
    text = TEXT.rstrip()  # of what comes after the last token nothing is predicted
    length = len(tokenizer(text).input_ids)
    settings = EvalSettings(folder="m", task=PERPLEXITY, lengths=(length,), items=1)
    found, _ = chosen([("a", text)], settings, [length], tokenizer)
    sizes = found[length, 0].sizes
    assert sizes is not None and sum(sizes) == len(text.encode())


def test_files_are_taken_by_length_and_the_rest_is_named(tmp_path):
    files = []
    for name, size in (("short", 20), ("long", 90), ("middle", 50)):
        (tmp_path / name).write_text("a" * size)
        files.append(str(tmp_path / name))
    texts, tokenizer = long_documents(files), of_bytes(True)
    assert [name for name, _ in texts] == [files[1], files[2], files[0]]
    settings = EvalSettings(
        folder="m", task=PERPLEXITY, lengths=(60, 40), items=2, text=tuple(files)
    )
    found, left_out = chosen(texts, settings, settings.lengths, tokenizer)
    assert {key: document.name for key, document in found.items()} == {
        (60, 0): files[1],
        (40, 0): files[1],
        (40, 1): files[2],
    }
    beyond = "--items 2: 1 of 3 documents, the shortest"
    assert [(each["length"], each["why"]) for each in left_out] == [
        (60, beyond),
        (60, "1 of 2 documents are shorter"),
        (40, beyond),
    ]
    with pytest.raises(
        ConfigError, match="--length 200: the longest document has 91 tokens"
    ):
        chosen(texts, settings, [200], tokenizer)


def test_a_wrong_length_is_named_by_the_commands_own_option():
    for task, option in ((PERPLEXITY, "--length"), ("lines", "--lengths")):
        with pytest.raises(
            ConfigError, match=rf"\A{option} 0: at least 2 tokens are needed"
        ):
            EvalSettings(folder="m", task=task, lengths=(0,))
