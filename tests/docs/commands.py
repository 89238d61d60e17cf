"""The commands of the pages, and which of them run here: ``TABLE`` has a short form, or the reason, for each.

Short means: the same command with the same options, in a folder with what ``reader`` makes (models of two layers, a few
texts), and with small values for what says how many processes, how long or how often. Plans run as they are written.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.docs.pages import DOCS, ROOT, Block, blocks, pages

LANGUAGES: Final = ("text", "", "sh", "bash", "console")
_PROGRAM: Final = r"(?:\S*torchrun|\S*python3?|\S*pip|ringspan|make|accelerate|sudo|sbatch|srun|kubectl|docker)"
# Values of options, and whole words, in place of the page's, in every command that runs.
SHORT: Final = {
    "--nnodes": "1", "--nproc-per-node": "2", "--nproc": "2", "--ranks": "2", "--tp": "2",
    "--rdzv-endpoint": "localhost:0", "--max-new-tokens": "3",
    "run=/shared/run": "run=shared", "steps=20": "steps=2", "checkpoints.every_steps=5": "checkpoints.every_steps=1",
    "data.sequence_length_tokens=524288": "data.sequence_length_tokens=64", "config.toml": "train.toml",
}  # fmt: skip


class Row(NamedTuple):
    """Commands that begin with ``start`` (a pattern): why they do not run, or what makes them short."""

    start: str
    why_not: str = ""
    short: Mapping[str, str] = {}
    added: str = ""
    """Arguments that the page leaves to their defaults."""
    first: tuple[str, ...] = ()
    """Commands of the page that go before."""
    quick: bool = False
    """Runs with every test, not in ``make docs-check`` alone."""


_EVAL: Final = Row(
    r"ringspan eval (lines|needle|tracing)", short={"--lengths": "800,900", "--depths": "0,1", "--distractors": "1"},
    added="--items 1",
)  # fmt: skip
_TRAIN: Final = "optimizer.warmup_steps=1 data.eval_fraction=0.3"
_RETRIEVAL: Final = "python examples/retrieval/train.py short"
_TINY_RETRIEVAL: Final = "--steps 2 --tokens 256 --length 1000"

# The first row that fits a command is the one that counts.
TABLE: Final = (
    Row(r"(\S*/)?pip install", "downloads packages"),
    Row(r"(\.venv/bin/)?python (-m venv peers|benchmarks/peers.py)", "is about packages that pip downloads before"),
    Row(r"sudo ", "needs root and tc; tests/measure/cluster/test_overlap.py has a small one"),
    Row(r"sbatch|kubectl", "needs a cluster"),
    Row(r"python examples/ray_train.py", "needs Ray; tests/train/test_ray.py"),
    Row(r"examples/in_context_rl/compare.py --world point", "needs dm_control; tests/examples has a stand-in for it"),
    Row(r"make ", added="--dry-run", quick=True),
    Row(r"ringspan plan .*--trace", short={"llama-3.1-8b": "./my-model"}),
    Row(r"ringspan plan .*Qwen2.5-VL"),
    Row(r"ringspan plan", quick=True),
    Row(r"ringspan init", quick=True),
    Row(r"ringspan doctor"),
    Row(r"ringspan rehearse", short={"llama-3.1-8b": "./my-model", "--length": "2048"}),
    Row(r"ringspan profile", short={"llama-3.1-8b": "./my-model", "--length": "128"}),
    Row(r"ringspan train examples/", added="steps=3 optimizer.warmup_steps=1 model.config.num_hidden_layers=1"),
    Row(r"ringspan train .*steps=", added=_TRAIN),
    Row(r"ringspan train", added=f"steps=2 {_TRAIN}"),
    Row(
        r"ringspan export", short={"2000": "2"},
        first=(f"ringspan train train.toml --nproc 2 run=runs/long steps=2 checkpoints.every_steps=1 {_TRAIN}",),
    ),
    Row(r"ringspan generate", short={"llama-3.1-8b": "model"}, added="--max-new-tokens 3"),
    _EVAL,
    Row(r"ringspan eval harness", short={"--tasks": "local_choice"}, added="--include tasks"),
    Row(r"ringspan eval perplexity", short={"--length": "512"}, added="--items 1"),
    Row(r"python -m benchmarks.memory", short={"--length": "128", "--variants": "chunks"}),
    Row(
        r"python -m benchmarks.context", short={"--budget": "2e9"},
        added="--layers 1 --hidden-size 24 --vocabulary 256 --trials 1 --max-length 1024",
    ),
    Row(r"python -m ringspan.conformance", added="--ranks 2"),
    Row(r"train.py"),
    Row(r"python examples/retrieval/train.py short", added=_TINY_RETRIEVAL),
    Row(r"examples/retrieval/train.py extend", added=_TINY_RETRIEVAL, first=(_RETRIEVAL,)),
    Row(r"python examples/retrieval/train.py control", added=_TINY_RETRIEVAL, first=(_RETRIEVAL,)),
    Row(
        r"examples/in_context_rl/compare.py --world grid",
        added="--trajectories bc,1,2 --seeds 1 --tasks 4 --collected 4 --steps 1 --tokens 64 --evaluated 2",
    ),
)  # fmt: skip


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
            at = words.index("-m") + 1 if "-m" in words else next(i for i, w in enumerate(words) if w.endswith(".py"))
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
    short = {**SHORT, **row.short}
    words = [short.get(word, word) if not word.startswith("-") else word for word in command.words]
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

    build("llama", vocab_size=300, max_position_embeddings=2048).save_pretrained(folder / "model")
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "!"
    tokenizer.save_pretrained(folder / "model")
    for name in ("my-model", "base", "tuned", "runs/demo/model", "runs/finetune/model"):
        shutil.copytree(folder / "model", folder / name)
    Qwen2_5_VLConfig().save_pretrained(folder / "Qwen2.5-VL-7B-Instruct")

    text = "\n\n".join(page.read_text(encoding="utf-8")[:2000] for page in sorted(DOCS.glob("*.md"))[:6])
    for name in ("book.txt", "prompt.txt"):
        (folder / name).write_text(text[:700], encoding="utf-8")
    (folder / "books").mkdir()
    for number in range(6):
        (folder / f"books/{number}.txt").write_text(text[number * 2000 :][:2000], encoding="utf-8")
    (folder / "train.toml").write_text(_block("start.md", "toml").replace("131072", "64"), encoding="utf-8")
    for name in ("run.toml", "config.toml"):
        shutil.copy(folder / "train.toml", folder / name)
    (folder / "tasks").mkdir()
    write(folder / "tasks")
    (folder / "my_module.py").write_text(_OWN_ATTENTION + _block("conformance.md", "py"), encoding="utf-8")
    (folder / "train.py").write_text(_script(), encoding="utf-8")
    for name in ("examples", "benchmarks", "README.md", "docs", "src"):
        (folder / name).symlink_to(ROOT / name)


_OWN_ATTENTION: Final = """
from ringspan.conformance.own import attention as own

def my_ring_attention(q, k, v, *, causal, document_lengths, length, group):
    return own(q, k, v, causal=causal, window=None, documents=document_lengths, length=length, group=group)

"""


def _block(page: str, language: str) -> str:
    return next(block.text for block in blocks(DOCS / page) if block.language == language) + "\n"


def _script() -> str:
    from tests.docs.running import REPLACED

    text = _block("how-to/gpus.md", "python")
    for written, here in REPLACED.items():
        text = text.replace(written, here.replace("{folder}", "."))
    made = "dataset = [{'input_ids': row, 'labels': row} for row in torch.arange(2, 130).view(2, 64)]\n"
    return text.replace("model = Auto", made + "model = Auto", 1)
