"""``ringspan generate``: the text of one process, from a prompt in a file; refusals before any rank starts."""

import io
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from ringspan.cli.commands.generate import prompt_text
from tests.cases import long, refusals
from tests.cli.test_bad_input import refusal
from tests.surface import check_object
from tests.train.runs import training_file

BOOK = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. "
QUESTION = "And then?"
SIZES: dict[str, Any] = tomllib.loads(training_file(Path()))["model"]["config"]
SIZES |= {"max_position_embeddings": 256, "tie_word_embeddings": False}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {
        letter: number
        for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_tokenizer(folder: Path) -> None:
    byte_tokenizer().save_pretrained(folder)


def save_model(folder: Path, seed: int = 0, **changes: Any) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES | changes))
    for (
        parameter
    ) in model.parameters():  # larger than usual, so that the text is not one token
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    save_model(folder)
    return folder


def expected(folder: Path, prompt: str, **options: Any) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    torch.manual_seed(options.pop("seed", 0))
    return model.generate(ids, max_new_tokens=12, **options)[0, ids.shape[1] :].tolist()


def printed(*arguments: Any, **options: Any) -> tuple[str, str]:
    """What a command of its own prints: ranks write the text themselves."""
    command = [sys.executable, "-m", "ringspan", "generate", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.long
def test_it_prints_the_text_of_one_process_and_what_it_took(folder, tmp_path):
    (tmp_path / "book.txt").write_text(BOOK)
    given = (
        folder,
        "--prompt-file",
        tmp_path / "book.txt",
        "--max-new-tokens",
        12,
        "--prefill-tokens",
        16,
    )
    out, err = printed(*given, "--nproc", 2, "--json")
    result = json.loads(out)
    check_object("generate", result)
    assert result["token_ids"] == expected(folder, BOOK)
    assert result["text"] == AutoTokenizer.from_pretrained(folder).decode(
        result["token_ids"]
    )
    layers, heads, size = 2, 2, 8
    # the last one is not kept; a rank holds half of them, but for a block of 64
    tokens = len(BOOK) + 11
    assert tokens * layers * 2 * heads * size * 4 // 2 <= result["cache_bytes_per_rank"]
    assert result["prefill_seconds"] > 0 and result["seconds_per_token"] > 0
    assert err.splitlines() == [
        "starting 2 ranks",
        *(f"read {n} of 79 tokens" for n in (32, 64, 79)),
    ]


@pytest.mark.long
def test_it_prints_the_text_as_it_comes_and_samples_under_a_seed(folder):
    options = (
        "--top-p",
        0.9,
        "--temperature",
        0.8,
        "--seed",
        7,
        "--max-new-tokens",
        12,
        "--nproc",
        2,
        "--tp",
        2,
    )
    out, err = printed(folder, "--prompt", BOOK, *options)
    new = expected(folder, BOOK, seed=7, do_sample=True, top_p=0.9, temperature=0.8)
    assert out == AutoTokenizer.from_pretrained(folder).decode(new) + "\n"
    assert err == "starting 2 ranks\n"


@pytest.mark.long
def test_under_torchrun_the_first_rank_prints_the_text(folder):
    """Its ranks are there already, and rank 0 alone reads the standard input."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "ringspan",
    ]
    command += [
        "generate",
        str(folder),
        "--prompt-file",
        "-",
        "--max-new-tokens",
        "12",
        "--json",
    ]
    done = subprocess.run(
        command, input=BOOK, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == expected(folder, BOOK)


def with_setting(folder, path, **setting):
    config = shutil.copytree(folder, path) / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **setting}))
    return path


@pytest.mark.long
@pytest.mark.parametrize("setting", [{}, {"prompt_lookup_num_tokens": 3}])
def test_a_chat_goes_on_from_what_was_said(folder, tmp_path, setting):
    folder = with_setting(folder, tmp_path / "model", **setting)
    options = ("--chat", "--nproc", 2, "--max-new-tokens", 12, "--prefill-tokens", 16)
    out, err = printed(folder, *options, input=f"{BOOK}\n\nAnd then?\n")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    texts, ids = "", []
    for line in (f"{BOOK.strip()}\n", "\nAnd then?\n"):
        ids = model.generate(
            torch.tensor([[*ids, *tokenizer(line).input_ids]]), max_new_tokens=12
        )[0].tolist()
        texts += tokenizer.decode(ids[-12:]) + "\n"
    assert out.rstrip("\n") == texts.rstrip("\n")
    assert err.count("> ") == 3


@pytest.fixture(scope="module")
def book(folder, tmp_path_factory):
    """A cache of the book alone: of the one token that was written nothing is kept."""
    path = tmp_path_factory.mktemp("caches") / "book"
    printed(
        folder,
        "--prompt",
        BOOK,
        "--max-new-tokens",
        1,
        "--nproc",
        2,
        "--save-cache",
        path,
    )
    return path


@pytest.mark.parametrize("ranks", long(2, 1, 3))
def test_a_book_is_read_once(folder, book, ranks):
    options = ("--load-cache", book, "--nproc", ranks, "--max-new-tokens", 12, "--json")
    out, err = printed(folder, "--prompt", QUESTION, *options)
    assert json.loads(out)["token_ids"] == expected(folder, BOOK + QUESTION)
    assert "read " not in err, "nothing of the book"


@pytest.mark.long
def test_a_cache_of_beams_is_refused(folder, tmp_path, monkeypatch, capsys):
    folder, kept = (
        with_setting(folder, tmp_path / "model", num_beams=3),
        ("--save-cache", tmp_path / "kept"),
    )
    given = ("generate", folder, "--prompt", QUESTION, "--max-new-tokens", "5", *kept)
    assert "--save-cache: generation_config.json has num_beams = 3" in refusal(
        monkeypatch, capsys, *given
    )


def test_the_byte_order_mark_of_a_file_is_no_part_of_the_prompt(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8-sig")
    assert prompt_text(None, tmp_path / "book.txt") == BOOK
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(BOOK.encode("utf-8-sig")))
    )
    assert prompt_text("-", None) == BOOK


@refusals("generate")
def test_bad_input_is_refused(
    monkeypatch, capsys, folder, tmp_path, arguments, message
):
    (tmp_path / "binary").write_bytes(b"a\xff")
    given = [
        argument.format(binary=tmp_path / "binary", book=BOOK) for argument in arguments
    ]
    assert message in refusal(monkeypatch, capsys, "generate", folder, *given)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no folder", "there is no such folder"),
        ("no config", "has no config.json"),
        ("a damaged config", "config.json"),
        ("no tokenizer", "has no tokenizer"),
        ("a damaged tokenizer", "its tokenizer cannot be read"),
        ("a larger tokenizer", "its tokenizer has 256 tokens, the model only 100"),
        ("an added token", "makes token 256 of this prompt, the model has 256"),
        ("half precision", "its weights are float16; choose --dtype"),
        ("an encoder", "is no causal language model"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    monkeypatch, capsys, tmp_path, what, message
):
    if what not in ("no folder", "no config"):
        size = {"a larger tokenizer": 100, "an added token": 256}.get(what, 300)
        dtype = "float16" if what == "half precision" else "float32"
        AutoConfig.for_model(
            **SIZES | {"vocab_size": size}, dtype=dtype
        ).save_pretrained(tmp_path)
    if what != "no tokenizer":
        save_tokenizer(tmp_path)
    match what:
        case "a damaged config":
            (tmp_path / "config.json").write_text("{")
        case "a damaged tokenizer":
            (tmp_path / "tokenizer.json").write_text('{"version": 1')
        case "an added token":
            tokenizer = AutoTokenizer.from_pretrained(tmp_path)
            tokenizer.add_tokens(["<image>"])
            tokenizer.save_pretrained(tmp_path)
        case "an encoder":
            AutoConfig.for_model("t5", vocab_size=300).save_pretrained(tmp_path)
    given = tmp_path / "nowhere" if what == "no folder" else tmp_path
    prompt = "An <image> here"
    line = refusal(
        monkeypatch,
        capsys,
        "generate",
        given,
        "--prompt",
        prompt,
        "--max-new-tokens",
        5,
    )
    assert message in line and str(given) in line
