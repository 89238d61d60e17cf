"""The commands of the pages, and which of them run here: ``commands.toml`` has a short form, or the reason, for each.

Short means: the same command with the same options, in a folder with what ``reader`` makes (models of two layers, a few
texts), and with small values for what says how many processes, how long or how often. Plans run as they are written.
"""

import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.docs.pages import DOCS, ROOT, Block, blocks, pages

LANGUAGES: Final = ("text", "", "sh", "bash", "console")
_PROGRAM: Final = r"(?:\S*torchrun|\S*python3?|\S*pip|ringspan|make|accelerate|sudo|sbatch|srun|kubectl|docker)"


class Row(NamedTuple):
    """What ``commands.toml`` has for some commands."""

    start: str
    why_not: str = ""
    short: Mapping[str, str] = {}
    added: str = ""
    first: Sequence[str] = ()
    quick: bool = False


_TABLES: Final = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
TABLE: Final = tuple(Row(**row) for row in _TABLES["commands"])


class Command(NamedTuple):
    """A line of a page, without prompt, comment and ellipsis."""

    place: str
    text: str

    @property
    def words(self) -> list[str]:
        return [word for word in shlex.split(self.text) if word != "..."]

    @property
    def program(self) -> str:
        """Without environment, and what torchrun starts without torchrun."""
        words = [word for word in self.words if not re.fullmatch(r"[A-Z_]+=\S+", word)]
        if words[0] == "torchrun":
            at = (
                words.index("-m") + 1
                if "-m" in words
                else next(i for i, w in enumerate(words) if w.endswith(".py"))
            )
            words = words[at:]
        return shlex.join(words)

    @property
    def row(self) -> Row | None:
        return next((row for row in TABLE if re.match(row.start, self.program)), None)


def commands() -> Iterator[Command]:
    """All of them, in the order of pages and lines."""
    for page in pages():
        for block in blocks(page):
            yield from commands_of(block)


def commands_of(block: Block) -> Iterator[Command]:
    if block.language not in LANGUAGES:
        return
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        # A program and an argument: a table of versions has two spaces there.
        if re.match(rf"(\$ )?([A-Z_]+=\S+ )*{_PROGRAM} [^\s:|]", line):
            yield Command(block.place, re.sub(r"^\$ |\s+#.*$", "", line))


def arguments(command: Command) -> list[str]:
    """What is run for it: the short form, on this Python."""
    row = command.row
    assert row is not None and not row.why_not, command
    short = {**_TABLES["short"], **row.short}
    words = [
        short.get(word, word) if not word.startswith("-") else word
        for word in command.words
    ]
    for at, word in enumerate(words[:-1]):
        if word.startswith("--") and word in short:
            words[at + 1] = short[word]
    added = row.added.split()
    if added and added[0] in words:  # the page says it itself
        added = []
    while re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        words.pop(0)  # about clusters
    return [*_started(words), *added]


def _started(words: list[str]) -> list[str]:
    python = [sys.executable, "-m"]
    match words[0]:
        case "ringspan":
            return [*python, *words]
        case "torchrun":
            meeting = [] if "--rdzv-backend" in words else ["--standalone"]
            return [*python, "torch.distributed.run", *meeting, *words[1:]]
        case "python":
            return [sys.executable, *words[1:]]
        case "make":
            return ["make", "-C", str(ROOT), *words[1:]]
        case other:
            raise ValueError(f"nobody says how {other} is started here")


def reader(folder: Path) -> None:
    """What the reader of a page has: models under the names that pages give them, texts, a training file, a module."""
    from transformers import Qwen2_5_VLConfig

    from tests.cli.commands.test_generate import byte_tokenizer
    from tests.evaluate.harness.data import write
    from tests.torch.models import build

    build("llama", vocab_size=300, max_position_embeddings=2048).save_pretrained(
        folder / "model"
    )
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "!"
    tokenizer.save_pretrained(folder / "model")
    for name in ("my-model", "base", "tuned", "runs/demo/model", "runs/finetune/model"):
        shutil.copytree(folder / "model", folder / name)
    Qwen2_5_VLConfig().save_pretrained(folder / "Qwen2.5-VL-7B-Instruct")

    text = "\n\n".join(
        page.read_text(encoding="utf-8")[:2000]
        for page in sorted(DOCS.glob("*.md"))[:6]
    )
    for name in ("book.txt", "prompt.txt"):
        (folder / name).write_text(text[:700], encoding="utf-8")
    (folder / "books").mkdir()
    for number in range(6):
        (folder / f"books/{number}.txt").write_text(
            text[number * 2000 :][:2000], encoding="utf-8"
        )
    (folder / "train.toml").write_text(
        _block("start.md", "toml").replace("131072", "64"), encoding="utf-8"
    )
    for name in ("run.toml", "config.toml"):
        shutil.copy(folder / "train.toml", folder / name)
    (folder / "tasks").mkdir()
    write(folder / "tasks")
    (folder / "my_module.py").write_text(
        _OWN_ATTENTION + _block("conformance.md", "py"), encoding="utf-8"
    )
    (folder / "train.py").write_text(_script(), encoding="utf-8")
    for name in ("examples", "benchmarks", "README.md", "docs", "src"):
        (folder / name).symlink_to(ROOT / name)


_OWN_ATTENTION: Final = """
from benchmarks.conformance.own import attention as own

def my_ring_attention(q, k, v, *, causal, document_lengths, length, group):
    return own(q, k, v, causal=causal, window=None, documents=document_lengths, length=length, group=group)

"""


def _block(page: str, language: str) -> str:
    return (
        next(block.text for block in blocks(DOCS / page) if block.language == language)
        + "\n"
    )


def _script() -> str:
    from tests.docs.running import REPLACED

    text = _block("how-to/gpus.md", "python")
    for written, here in REPLACED.items():
        text = text.replace(written, here.replace("{folder}", "."))
    made = "dataset = [{'input_ids': row, 'labels': row} for row in torch.arange(2, 130).view(2, 64)]\n"
    return text.replace("model = Auto", made + "model = Auto", 1)
