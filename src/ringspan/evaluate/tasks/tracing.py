"""Variable tracking, RULER's multi-hop category: variables that got a value directly or through others."""

from random import Random
from string import ascii_uppercase
from typing import Final

from ringspan.evaluate.task import Material, Prompt, Task

HOPS: Final = 4
CHAINS: Final = 2


def build(random: Random, size: int, depth: float, material: Material) -> Prompt:
    """Build chains of assignments in real text, in order, of which the first is asked for."""
    count = CHAINS * (HOPS + 1)
    variables: list[str] = []
    while len(variables) < count:
        name = "".join(random.choices(ascii_uppercase, k=5))
        variables += [name] if name not in variables else []
    values = random.sample(range(10_000, 100_000), CHAINS)
    excerpt = material.excerpt(random, size)
    placed: list[tuple[int, int, str]] = []
    for chain in range(CHAINS):
        names = variables[chain::CHAINS]
        sources = [str(values[chain]), *(f"VAR {name}" for name in names[:-1])]
        places = sorted(random.randint(0, size) for _ in names)
        placed += [
            (place, order, f"VAR {name} = {source}.")
            for order, (place, name, source) in enumerate(zip(places, names, sources, strict=True))
        ]
    for place, _, sentence in sorted(placed, reverse=True):  # those of one place keep the order of their chain
        excerpt.insert(place, sentence)
    answers = tuple(variables[0::CHAINS])
    return Prompt(
        "Memorize and track the chains of variable assignments hidden in the following text.\n\n"
        f"{' '.join(excerpt)}\n\nFind all variables that are assigned the value {values[0]} in the text above.",
        f"\n{len(answers)} variables are assigned the value {values[0]} in the text above. They are:",
        answers,
    )


TASK: Final = Task("tracing", "Track assignments through chains of variables.", build, needs_text=True)
