"""The options that are combined at random: a dimension is a table, a new option is a row of it.

The first row of a table is its simplest, to which a failing draw is reduced. A draw names a row of each table.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

Draw = dict[str, str]


class Family(NamedTuple):
    """A tiny model, and how far from one process it may be in float64."""

    kind: str
    changes: dict[str, Any]
    bound: float
    traits: frozenset[str]


class Sizes(NamedTuple):
    ranks: int
    replicate: int = 1
    tp: int = 1

    @property
    def ring(self) -> int:
        return self.ranks // (self.replicate * self.tp)


def _family(kind: str, *traits: str, bound: float = 1e-9, **changes: Any) -> Family:
    return Family(kind, changes, bound, frozenset(traits))


# transformers computes temperatures, or what routers lose, in float32
_IN_FLOAT32: Final = 1e-6
FAMILIES: Final[dict[str, Family]] = {
    "llama": _family("llama", "packs"),
    "llama-tied": _family("llama-tied", "packs"),
    "qwen3-window": _family("qwen3-window"),
    "mistral-window": _family("mistral-window", "packs"),
    "granite": _family("granite"),
    "gemma2": _family("gemma2", "softcap"),
    "gemma3_text": _family("gemma3_text"),
    "gemma4_text": _family("gemma4_text"),
    "gpt2": _family("gpt2", "no tp"),
    "gpt_oss": _family("gpt_oss", "experts", "no tp"),
    "mixtral": _family("mixtral", "experts", "no tp", num_local_experts=4),
    "llama4_text": _family(
        "llama4_text", "experts", "no tp", "no feed-forward", bound=_IN_FLOAT32
    ),
    "deepseek_v3": _family("deepseek_v3", "experts", "no tp"),
    "qwen3_next": _family("qwen3_next", "states", "experts"),
    "falcon_h1": _family("falcon_h1", "states"),
    "jamba": _family("jamba", "states", "experts", "two experts"),
    "lfm2": _family("lfm2", "states"),
    "mamba2": _family("mamba2", "states", "no feed-forward"),
    "minimax": _family("minimax", "states", "experts", "two experts", "no generation"),
    "deepseek_v32": _family("deepseek_v32", "index", "experts"),
    "glm_moe_dsa": _family("glm_moe_dsa", "index", "experts"),
    "qwen4_exp_text": _family("qwen4_exp_text", "index", "states", "experts"),
}

MESHES: Final[dict[str, Sizes]] = {
    "ring 2": Sizes(2),
    "one rank": Sizes(1),
    "2 replicas": Sizes(2, replicate=2),
    "ring 3": Sizes(3),
    "ring 4": Sizes(4),
    "2 replicas of ring 2": Sizes(4, replicate=2),
    "ring 2, tp 2": Sizes(4, tp=2),
    "tp 2": Sizes(2, tp=2),
}

# Options of ``parallelize`` by the values that they are drawn from.
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "layout": {name: name for name in ("zigzag", "contiguous", "striped", "balanced")},
    "route": {
        name: name
        for name in (
            "ring", "bidirectional", "double-ring:2", "all-gather", "pass-q", "ulysses", "ulysses:2",
            "ulysses:2+all-gather", "auto",
        )
    },
    "kernel": {"auto": "auto", "eager": "eager", "cpu": "cpu"},
    "checkpoint": {name: name for name in ("attention", "none", "full")},
    "layers_per_checkpoint": {"1": 1, "2": 2},
    "folds": {"1": 1, "2": 2, "3": 3},
    "offload": {"none": "none", "activations": "activations"},
    "loss_chunk_tokens": {"1024": 1024, "5": 5},
    "loss_chunk_vocabulary": {"all": None, "13": 13},
    "feedforward_chunk_tokens": {"auto": "auto", "0": 0, "3": 3},
    "norm_chunk_tokens": {"auto": "auto", "4": 4},
    "expert_slices": {"1": 1, "2": 2, "3": 3, "auto": "auto"},
    "z_loss": {"0": 0.0, "0.01": 0.01},
    "label_smoothing": {"0": 0.0, "0.1": 0.1},
}  # fmt: skip

# What is between a forward pass and its backward pass, or between two steps.
EVENTS: Final = (
    "nothing",
    "evaluation",
    "log-probabilities",
    "generation",
    "a pass",
    "a second loss",
)

TABLES: Final[dict[str, dict[str, Any]]] = {
    "family": dict(FAMILIES),
    "mesh": dict(MESHES),
    "data": {
        name: name
        for name in ("row", "rows", "packed", "flattened", "padded right", "padded left", "tree", "tree, each")
    },
    "length": {"37": 37, "64": 64, "11": 11},
    "labels": {"all": False, "few": True},
    "trains": {name: name for name in ("all", "LoRA", "LoRA and norms", "DoRA", "QLoRA", "a part")},
    **OPTIONS,
    "accumulate": {"1": 1, "2": 2},
    "clip": {"none": None, "0.1": 0.1},
    "optimizer": {"SGD": "SGD", "AdamW": "AdamW"},
    "inside": {name: name for name in EVENTS},
    "between": {name: name for name in (*EVENTS[:-1], "resume on the same mesh", "resume on another mesh")},
    "dtype": {name: name for name in ("float64", "float32", "bfloat16")},
}  # fmt: skip

# Tables whose rows are all drawn alike; of the others, a share of each draw is the first row.
_ALWAYS: Final = ("family", "mesh", "data")
_SHARES: Final = (0.15, 0.4, 0.7)
_KEPT_SHARE: Final = 0.04  # of draws that are refused


def value(draw: Draw, name: str) -> Any:
    return TABLES[name][draw[name]]


def options_of(draw: Draw) -> dict[str, Any]:
    return {name: value(draw, name) for name in OPTIONS}


@dataclass(frozen=True)
class Refusal:
    """What ringspan refuses: of which draws, and what it says."""

    message: str
    when: Callable[[Draw], bool]


def _has(draw: Draw, *traits: str) -> bool:
    return not value(draw, "family").traits.isdisjoint(traits)


def _is_in_folds(draw: Draw) -> bool:
    return draw["folds"] != "1"


def _is_tree(draw: Draw) -> bool:
    return draw["data"].startswith("tree")


def _splits_heads(draw: Draw) -> bool:
    return value(draw, "mesh").tp > 1


def _takes_pairs(draw: Draw) -> bool:
    """Whether the route is of pairs of ranks, in a ring that has one too many."""
    return ":2" in draw["route"] and value(draw, "mesh").ring % 2 > 0


REFUSALS: Final = (
    Refusal(
        "moves what checkpointing keeps",
        lambda draw: draw["offload"] != "none" and draw["checkpoint"] == "none",
    ),
    Refusal(
        "layers share the input",
        lambda draw: (
            draw["layers_per_checkpoint"] != "1" and draw["checkpoint"] == "none"
        ),
    ),
    Refusal("do not divide", _takes_pairs),
    # All models here have four heads.
    Refusal(
        "do not split evenly",
        lambda draw: draw["route"] == "ulysses" and value(draw, "mesh").ring == 3,
    ),
    Refusal(
        "has no Ulysses groups",
        lambda draw: "ulysses" in draw["route"] and draw["layout"] == "balanced",
    ),
    Refusal(
        "does not go with route",
        lambda draw: (
            _is_in_folds(draw)
            and (draw["route"] == "auto" or "ulysses" in draw["route"])
        ),
    ),
    Refusal(
        "is not split into folds",
        lambda draw: _is_in_folds(draw) and draw["layout"] in ("striped", "balanced"),
    ),
    Refusal(
        "does not go with folds", lambda draw: _is_in_folds(draw) and _is_tree(draw)
    ),
    Refusal(
        "does not go with layers with an index",
        lambda draw: (_is_in_folds(draw) or _is_tree(draw)) and _has(draw, "index"),
    ),
    Refusal(
        "has no layer whose experts are stacked",
        lambda draw: (
            draw["expert_slices"] in ("2", "3")
            and (not _has(draw, "experts") or draw["family"] == "llama4_text")
        ),
    ),
    Refusal(
        "use 2 slices at most",
        lambda draw: draw["expert_slices"] == "3" and _has(draw, "two experts"),
    ),
    Refusal(
        "for which it has no code",
        lambda draw: draw["kernel"] == "cpu" and _has(draw, "index"),
    ),
    Refusal(
        "it has no softcap",
        lambda draw: draw["kernel"] == "cpu" and _has(draw, "softcap"),
    ),
    Refusal(
        "striped", lambda draw: draw["layout"] == "striped" and _has(draw, "states")
    ),
    Refusal(
        "does not generate on a ring",
        lambda draw: (
            _has(draw, "no generation")
            and "generation" in (draw["inside"], draw["between"])
        ),
    ),
    Refusal(
        "use tp=1",
        lambda draw: _splits_heads(draw) and _has(draw, "states", "index", "no tp"),
    ),
    Refusal(
        "an adapter that tp cannot split",
        lambda draw: _splits_heads(draw) and draw["trains"] == "DoRA",
    ),
    Refusal(
        "no feed-forward that can run in chunks",
        lambda draw: (
            draw["feedforward_chunk_tokens"] == "3" and _has(draw, "no feed-forward")
        ),
    ),
)


def refusals_of(draw: Draw) -> list[str]:
    return [refusal.message for refusal in REFUSALS if refusal.when(draw)]


def drawn(generator: random.Random, most_ranks: int) -> Draw:
    """Draw a row of each table; most of those that are refused are drawn again."""
    draw = _drawn(generator, most_ranks)
    while refusals_of(draw) and generator.random() > _KEPT_SHARE:
        draw = _drawn(generator, most_ranks)
    return draw


def _drawn(generator: random.Random, most_ranks: int) -> Draw:
    share = generator.choice(_SHARES)
    draw: Draw = {}
    for name, rows in TABLES.items():
        names = [
            row for row in rows if name != "mesh" or MESHES[row].ranks <= most_ranks
        ]
        is_any = name in _ALWAYS or generator.random() < share
        draw[name] = generator.choice(names) if is_any else names[0]
    return settled(draw, most_ranks)


def settled(draw: Draw, most_ranks: int) -> Draw:
    """Take back what has no meaning beside the rest of a draw."""
    draw, family, mesh = dict(draw), value(draw, "family"), value(draw, "mesh")
    if draw["trains"] == "QLoRA":
        if "packs" in family.traits and mesh.tp == 1:
            draw["dtype"] = "float32"  # bitsandbytes computes in no wider one
        else:
            draw["trains"] = "LoRA"
    if draw["trains"] == "DoRA" and "experts" in family.traits:
        draw["trains"] = "LoRA"  # PEFT has none of experts that are one parameter
    if draw["dtype"] == "bfloat16" and family.traits & {"experts", "states", "index"}:
        draw["dtype"] = "float32"  # rounded scores choose other experts and keys
    if draw["dtype"] != "float64":
        # Adam makes a step of a gradient that is nothing but rounding
        draw["optimizer"] = "SGD"
        if draw["between"].startswith("resume"):
            draw["between"] = "nothing"
    if draw["between"].startswith("resume") and mesh.ranks != most_ranks:
        draw["between"] = "nothing"  # a checkpoint is of all ranks that were started
    if draw["between"].startswith("resume") and mesh.tp > 1:
        draw["between"] = "nothing"
    if draw["between"] == "resume on another mesh" and ":2" in draw["route"]:
        draw["route"] = "ring"  # the other mesh may have rings of one rank
    return draw


def line_of(draw: Draw) -> str:
    """Return a draw as text: the rows that are not the first of their table."""
    return "; ".join(
        f"{name}={row}" for name, row in draw.items() if row != next(iter(TABLES[name]))
    )


def read(line: str) -> Draw:
    """Return the draw of a line.

    Raises:
        ValueError: it names a table or a row that does not exist.
    """
    draw = {name: next(iter(rows)) for name, rows in TABLES.items()}
    for part in filter(None, map(str.strip, line.split(";"))):
        name, _, row = part.partition("=")
        if row not in TABLES.get(name, {}):
            raise ValueError(
                f"{part!r}: choose a row of {', '.join(TABLES.get(name, TABLES))}"
            )
        draw[name] = row
    return draw
