"""A reader's test: questions that users have, the page that answers each, and how far it is from the first page."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, prose

# Question, page, and sentences of the page that answer it.
QUESTIONS = [
    (
        "What do I install, and how do I know that it works?",
        "start.md",
        "pip install '.[train]'\nringspan doctor",
        "`ringspan doctor` ends with `can train`, or says what prevents it and what to do",
    ),
    (
        "Does my model fit at 128K tokens on my GPUs?",
        "start.md",
        "ringspan plan --model ./my-model --devices 8 --device h100 --length 131072",
        "fits: yes, 56.1 GB of 80.0 GB per device at the peak",
    ),
    (
        "I have a training loop of my own. What changes?",
        "how-to/gpus.md",
        "Three lines change",
        "model = rs.parallelize(model, mesh)",
        "loss = model(**rs.shard_batch(batch, mesh)).loss",
    ),
    (
        "How do I use it in TRL's SFTTrainer?",
        "trainers.md",
        "class Trainer(RingTrainerMixin, trl.SFTTrainer): ...",
        "ring=RingConfig(ring=4),  # the new argument",
    ),
    (
        "Can I train with LoRA?",
        "adapters.md",
        "model = get_peft_model(model, LoraConfig(",
        "Loss and gradients equal one process for LoRA on any linear layer",
    ),
    (
        "My data is many short documents. Will they see each other?",
        "how-to/documents.md",
        "Give `position_ids` that start from 0 for each document.",
        "each document is attended to as if it were alone",
    ),
    (
        "How do I start it on two nodes with Slurm?",
        "how-to/nodes.md",
        "sbatch examples/cluster/slurm.sh train.toml /shared/run",
        "saves 120 s before the time limit or a preemption, and puts the job back into the queue",
    ),
    (
        "Which mesh should I take?",
        "how-to/mesh.md",
        "does a training step fit, on which mesh, layout and route, with which checkpointing, how fast, and why",
    ),
    (
        "I run out of memory. What do I try first?",
        "how-to/memory.md",
        "try them in this order, and stop when it fits",
        "1. **More ranks in the ring.** Everything that grows with the sequence is divided by them.",
    ),
    (
        "A node died. How do I continue?",
        "how-to/resume.md",
        "Start the same command again",
        "A run resumes from its newest valid checkpoint, on as many ranks as you give it",
    ),
    (
        "How do I ask the trained model about a whole book?",
        "how-to/full-length.md",
        "ringspan generate runs/finetune/model --prompt-file book.txt --nproc 4",
        "The first reads the prompt over all ranks and prints the answer",
    ),
    (
        "Does it work with Qwen3-Next and Mamba?",
        "hybrids.md",
        "They run on a ring like any other model",
        "| gated delta rule | Qwen3-Next,",
        "| Mamba | Mamba,",
    ),
    (
        "Can it train on images?",
        "multimodal.md",
        "Models of transformers that see or hear train on the ring with images, video and sound in the batch",
    ),
    (
        "Is there a version for JAX and TPUs?",
        "jax.md",
        "computes each block with Pallas kernels for TPUs",
        "They have been compiled for TPUs and never run on one.",
    ),
    (
        "I use DeepSpeed's Ulysses. What is its counterpart?",
        "how-to/from-deepspeed.md",
        '| `UlyssesSPAttentionHF.register_with_transformers(...)` | `rs.parallelize(model, mesh, route="ulysses")` |',
    ),
    (
        "Why is the result exact?",
        "understand/blocks.md",
        "Attention over both follows from their partials alone",
        "Nothing was left out, so the merge is exact.",
    ),
    (
        "When does the communication cost nothing?",
        "understand/overlap.md",
        "The ring takes no longer than the computation alone as long as every block arrives before it is needed.",
        "as many key/value heads as query heads this is $c \\ge F / B$",
    ),
    (
        "Why are the tokens not dealt out in order?",
        "understand/balance.md",
        "The last rank has 2 − 1/N times the mean, so a ring of eight takes nearly twice as long as it should.",
    ),
    (
        "Should I take a ring or Ulysses?",
        "understand/ulysses.md",
        "**Inside a node, with short shares and many heads**, Ulysses is often faster",
        "**Between nodes, at long lengths, with few key/value heads or with windows**, a ring is.",
    ),
    (
        "What was never measured?",
        "not-measured.md",
        "Everything was measured on two CPU cores, except for fifteen minutes on [one GPU](gpu.md).",
        "| several GPUs, NVLink, InfiniBand | not run",
    ),
    (
        "What does `memory.checkpoint` in the training file take?",
        "memory.md",
        "| `checkpoint` | `memory.checkpoint` | `none`, `attention`, `full`; in the file also `auto`",
    ),
    ("Is my model supported?", "models.md", "Of the former 156, and of the latter 80,"),
]


def linked(page: Path, contents: bool = True) -> set[Path]:
    """Pages that a page leads to, by its links and by its tables of contents, which only the site shows."""
    targets = re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", prose(page))
    for table in re.findall(r"```{toctree}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL) if contents else ():
        targets += [f"{line}.md" for line in table.splitlines() if line and not line.startswith(":")]
    found = {(page.parent / target).resolve() for target in targets}
    return {each for each in found if each.is_relative_to(DOCS) and each.exists()}


def within_two_clicks(start: Path, contents: bool) -> set[Path]:
    first = linked(start, contents)
    return {start, *first, *(page for each in first for page in linked(each, contents))}


def plain(text: str) -> str:
    """Without line breaks, which no reader sees."""
    return " ".join(text.split())


@pytest.mark.parametrize(("question", "page", "answers"), [(q, page, a) for q, page, *a in QUESTIONS])
def test_a_question_is_answered(question: str, page: str, answers: list[str]):
    text = plain((DOCS / page).read_text(encoding="utf-8"))
    assert [answer for answer in answers if plain(answer) not in text] == [], question


@pytest.mark.parametrize(("start", "contents"), [("docs/index.md", True), ("README.md", False)])
def test_every_page_is_within_two_clicks(start: str, contents: bool):
    assert set(DOCS.rglob("*.md")) - within_two_clicks(ROOT / start, contents) == set()
