"""A reader's test: questions that users have, the page that answers each, and how far it is from the first page."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, prose

# Question, page, and words of the answer.
QUESTIONS = [
    ("What do I install, and how do I know that it works?", "start.md", "ringspan doctor"),
    ("Does my model fit at 128K tokens on my GPUs?", "start.md", "ringspan plan --model"),
    ("I have a training loop of my own. What changes?", "how-to/gpus.md", "rs.parallelize(model, mesh)"),
    ("How do I use it in TRL's SFTTrainer?", "trainers.md", "RingSFTTrainer"),
    ("Can I train with LoRA?", "adapters.md", "get_peft_model"),
    ("My data is many short documents. Will they see each other?", "how-to/documents.md", "as if it were alone"),
    ("How do I start it on two nodes with Slurm?", "how-to/nodes.md", "sbatch"),
    ("Which mesh should I take?", "how-to/mesh.md", "ringspan plan"),
    ("I run out of memory. What do I try first?", "how-to/memory.md", "The levers, in their order"),
    ("A node died. How do I continue?", "how-to/resume.md", "resum"),
    ("How do I ask the trained model about a whole book?", "how-to/full-length.md", "generate"),
    ("Does it work with Qwen3-Next and Mamba?", "hybrids.md", "Qwen3-Next"),
    ("Can it train on images?", "multimodal.md", "image"),
    ("Is there a version for JAX and TPUs?", "jax.md", "shard_map"),
    ("I use DeepSpeed's Ulysses. What is its counterpart?", "how-to/from-deepspeed.md", 'route="ulysses"'),
    ("Why is the result exact?", "understand/blocks.md", "so the merge is exact"),
    ("When does the communication cost nothing?", "understand/overlap.md", "c \\ge"),
    ("Why are the tokens not dealt out in order?", "understand/balance.md", "early one that sees little"),
    ("Should I take a ring or Ulysses?", "understand/ulysses.md", "Inside a node"),
    ("What was never measured?", "not-measured.md", "never run on a device"),
    ("What does `memory.checkpoint` in the training file take?", "memory.md", "`memory.checkpoint`"),
    ("Is my model supported?", "models.md", "llama"),
]


def linked(page: Path) -> set[Path]:
    """Pages that a page leads to, by its links and its tables of contents."""
    targets = re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", prose(page))
    for contents in re.findall(r"```{toctree}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        targets += [f"{line}.md" for line in contents.splitlines() if line and not line.startswith(":")]
    found = {(page.parent / target).resolve() for target in targets}
    return {each for each in found if each.is_relative_to(DOCS) and each.exists()}


def within_two_clicks() -> set[Path]:
    first = linked(DOCS / "start.md") | linked(DOCS / "index.md")
    return {DOCS / "index.md", *first, *(page for each in first for page in linked(each))}


@pytest.mark.parametrize(("question", "page", "answer"), QUESTIONS, ids=[page for _, page, _ in QUESTIONS])
def test_a_question_is_answered_within_two_clicks(question: str, page: str, answer: str):
    assert DOCS / page in within_two_clicks(), question
    assert answer in (DOCS / page).read_text(encoding="utf-8"), question


def test_every_page_is_within_two_clicks():
    assert {page for page in DOCS.rglob("*.md") if page not in within_two_clicks()} == set()
