"""Line retrieval, as in LongEval (Li et al. 2023) and figure 3 of the Ring Attention paper."""

from random import Random
from typing import Final

from ringspan.evaluate.task import Material, Prompt, Task, first_number
from ringspan.evaluate.words import names, number

BEFORE: Final = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
AFTER: Final = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in "
ASKED: Final = "? I need the number."


def cue(name: str) -> str:
    """Return a line up to its number."""
    return f"line {name}: REGISTER_CONTENT is <"


def record(pairs: list[tuple[str, str]]) -> str:
    """Return lines of names and numbers."""
    return "".join(f"{cue(name)}{value}>\n" for name, value in pairs)


def build(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build lines, any one of which is asked for."""
    pairs = [(name, number(random)) for name in names(random, size)]
    name, value = random.choice(pairs)
    return Prompt(f"{BEFORE}{record(pairs)}{AFTER}line {name}{ASKED}", f"\n{cue(name)}", (value,))


TASK: Final = Task("lines", "Retrieve the number of one line of a record.", build, first_number)
