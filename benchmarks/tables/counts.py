"""Tables that no clock is needed for: the overlap law, the balance of layouts, errors."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.result_files import read, table
from ringspan.core.messages.units import (
    shown_bandwidth,
    shown_bytes,
    shown_seconds,
    shown_speed,
)
from ringspan.plan.cluster.hardware import device, min_block_tokens
from ringspan.plan.group import compare_group
from ringspan.plan.model.configs import model_shape
from ringspan.plan.search import Question

_CODES: Final = {
    "exact": "`exact`",
    "bfloat16": "`bfloat16`",
    "int8": "`int8`, a scale per head and block",
    "float8": "`float8` (e4m3), a scale per head and block",
    "gradients in bfloat16": '`gradient_comm_dtype="bfloat16"`',
}
_GROUPED: Final = 4  # query heads on a key/value head


def overlap_devices() -> str:
    """From how many tokens per rank on a ring hides, by data sheets."""
    rows: list[Sequence[object]] = []
    for name in ("a100-80gb", "h100", "b200", "tpu-v5p"):
        each = device(name)
        inside, between = each.intra_node_bandwidth, each.inter_node_bandwidth
        tokens = (
            min_block_tokens(each.flops, inside),
            min_block_tokens(each.flops, between),
        )
        links = [shown_bandwidth(inside), shown_bandwidth(between)]
        counts = [f"{count:,.0f}" for count in (*tokens, tokens[1] / _GROUPED)]
        rows.append((each.title, shown_speed(each.flops), *links, *counts))
    return table(
        (
            "device",
            "F",
            "B in a node",
            "B between nodes",
            "c in a node",
            "c between nodes",
            "c, grouped heads",
        ),
        rows,
    )


def overlap(name: str) -> str:
    """Where a transfer hides, as the law says and as it was measured."""
    (found,) = read(name)
    rows = [
        (
            f"{each['gigabits']:g} Gbit/s",
            each["dtype"],
            each["heads"] // each["kv_heads"],
            f"{each['flops_per_second'] / 1e9:.0f}",
            f"{each['bytes_per_second'] / 1e6:.1f}",
            f"{each['predicted_tokens']:,.0f}",
            f"{each['crossing_tokens']:,.0f}",
            f"{each['crossing_over_predicted']:.2f}",
        )
        for each in found["result"]["sweeps"]
    ]
    head = (
        "link",
        "dtype",
        "query heads on one",
        "F (GFLOP/s)",
        "B (MB/s)",
        "predicted",
        "measured",
    )
    return table((*head, "measured / predicted"), rows, left=2)


_GROUPS: Final = (
    (32_768, 8, 1024),
    (30_000, 16, 1000),
    (4096, 8, 256),
    (2048, 2, 512),
    (512, 8, 2048),
)


def shared_prefixes() -> str:
    """Answers to one prompt, as separate rows and as one tree, by the plan."""
    question = Question(
        shape=model_shape("llama-3.1-8b"), device=device("h100"), devices=8, length=1
    )
    rows: list[Sequence[object]] = []
    for prompt, group, completion in _GROUPS:
        ways = compare_group(question, group, prompt, completion)
        tree, each = (
            way | {"bytes": way["peak_bytes"] + way["reserve_bytes"]}
            for way in ways.values()
        )

        def shown(
            name: str, form: Callable[[float], str], tree: Any = tree, each: Any = each
        ) -> str:
            return f"{form(each[name])} → {form(tree[name])} ({tree[name] / each[name]:.0%})"

        rows.append(
            (
                f"{prompt:,}",
                f"{group} of {completion:,}",
                shown("tokens", lambda value: f"{value:,}"),
                shown("pairs", lambda value: f"{value / 1e6:,.1f}M"),
                shown("bytes", shown_bytes),
                shown("step_seconds", shown_seconds),
            )
        )
    return table(
        ("prompt", "answers", "tokens", "pairs", "memory per device", "step"), rows
    )


_DOCUMENTS: Final = {
    "lognormal": "lognormal around 2K",
    "code": "Python's source files",
    "one_long": "one of 64K among short ones",
}


def balanced() -> str:
    """The balanced layout of all documents: work, and what is sent of what zigzag per document sends."""
    found = {
        (row["documents"], row["length_tokens"], row["ranks"], row["layout"]): row
        for row in read("layouts-counts")["rows"]
    }
    ranks = sorted({key[2] for key in found})
    rows: list[Sequence[object]] = []
    for kind, shown in _DOCUMENTS.items():
        for length in sorted({key[1] for key in found}):
            cells: list[str] = []
            for number in ranks:
                row = found[kind, length, number, "balanced"]
                zigzag = found[kind, length, number, "zigzag per document"][
                    "sent_tokens"
                ]
                cells += [
                    f"{row['most_work_over_mean']:.3f}",
                    f"{row['sent_tokens'] / zigzag:.1%}",
                ]
            rows.append((shown, f"{length:,}", *cells))
    head = [
        f"{number} ranks: work" if part else "sent"
        for number in ranks
        for part in (True, False)
    ]
    return table(("documents", "tokens", *head), rows)


def layouts() -> str:
    """Balance and bytes of documents on 16 ranks."""
    found = {
        (row["layout"], row["documents"]): row
        for row in read("layouts-counts")["rows"]
        if (row["length_tokens"], row["ranks"]) == (1 << 20, 16)
    }
    names = (
        "balanced",
        "zigzag",
        "zigzag per document",
        "striped",
        "contiguous",
        "chunks",
    )
    rows: list[Sequence[object]] = []
    for name in (*names, "ulysses"):
        cells = [
            shown
            for kind in _DOCUMENTS
            for row in (found[name, kind],)
            for shown in (
                f"{row['most_work_over_mean']:.2f}",
                f"{row['sent_tokens']:,}",
            )
        ]
        rows.append(("Ulysses" if name == "ulysses" else name, *cells))
    head = [
        f"{shown}: work" if part == "work" else "sent"
        for shown in _DOCUMENTS.values()
        for part in ("work", "sent")
    ]
    return table(("1,048,576 tokens on 16 ranks", *head), rows)


def received() -> str:
    """Blocks that ranks receive on the route ring, and if each were passed on through all ranks."""
    numbers = ("received", "unused", "tokens")
    rows = [
        (
            f"{row['layout']}, {row['documents'].replace('_', ' ')}, {row['ranks']} ranks",
            *(
                f"{row[how][number]:,}"
                for how in ("ring", "passed_on")
                for number in numbers
            ),
        )
        for row in read("layouts-counts")["rows"]
        if row["length_tokens"] == 1 << 18
        and row["layout"] in ("balanced", "zigzag")
        and row["ranks"] > 4
    ]
    return table(
        (
            "262,144 tokens",
            "`ring`: blocks",
            "unused",
            "tokens",
            "passed on: blocks",
            "unused",
            "tokens",
        ),
        rows,
    )


def states() -> str:
    """Errors of layers with a state against float64, by ranks."""
    rows = [
        (
            each["layer"],
            f"{each['tokens']:,}",
            row["ranks"],
            f"{row['out']:.1e}",
            f"{row['worst_gradient']:.1e}",
        )
        for each in read("recurrence-error-cpu")["layers"]
        for row in each["rows"]
    ]
    return table(("layer", "tokens", "ranks", "out", "worst gradient"), rows)


def communication() -> str:
    """Errors of coded keys, values and gradients."""
    rows = {
        (row["code"], row["ranks"]): row
        for row in read("communication-error-cpu")["rows"]
    }
    lines: list[Sequence[object]] = []
    for code, shown in _CODES.items():
        two, eight = rows[code, 2], rows[code, 8]
        passes = ("forward_bytes", "backward_bytes")
        shares = [f"{eight[each] / rows['exact', 8][each]:.2f}" for each in passes]
        errors = [
            f"{row[name]:.1e}"
            for row, name in (
                (two, "out"),
                *((eight, each) for each in ("out", "dq", "dk", "dv")),
            )
        ]
        lines.append((shown, *shares, *errors))
    head = (
        "sent as",
        "bytes, forward",
        "bytes, backward",
        "out, 2 ranks",
        "out, 8 ranks",
        "dq",
        "dk",
        "dv",
    )
    return table(head, lines)


def errors(dtype: str) -> str:
    """Errors on rings of growing length beside those of one process."""
    (found,) = read("error-cpu")
    (curve,) = [each for each in found["result"]["curves"] if each["dtype"] == dtype]
    names = ("out", "dq", "dk", "dv")
    rows = [
        ("one process, SDPA", curve["one_process"]),
        *((f"ring of {row['ranks']}", row) for row in curve["rows"]),
    ]
    return table(
        ("", *names),
        [(title, *(f"{row[name]:.2e}" for name in names)) for title, row in rows],
    )


def faults() -> str:
    """What real jobs did when they were struck."""
    found = {row["name"]: row for row in read("faults-cpu") if row["name"] in _SEEN}
    assert all(row["passed"] == row["tries"] for row in found.values()), (
        "a promise was not kept"
    )
    rows: list[Sequence[object]] = []
    for name, shown in _SEEN.items():
        row = found[name]
        title = (
            f"no fault, steps of {row['figures']['step_seconds']:.1f} s"
            if name == "cost"
            else row["fault"]
        )
        rows.append((title, shown(row["figures"]), row["tries"]))
    return table(("fault", "seen", "times"), rows, left=2)


def _spread(figures: dict[str, float]) -> str:
    return f"{figures['median']:.3g} s (at most {figures['largest']:.3g} s)"


_SEEN: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "kill": lambda figures: (
        f"survivors gone after {_spread(figures['survivors_gone_seconds'])}, "
        f"next step after {_spread(figures['next_step_seconds'])}; losses bit-equal"
    ),
    "stop": lambda figures: (
        f"named after {_spread(figures['named_seconds'])}, "
        f"with a time-out of {figures['min_timeout_seconds']:g} s; losses bit-equal"
    ),
    "term": lambda figures: (
        f"saved and gone after {_spread(figures['saved_and_gone_seconds'])}; losses bit-equal"
    ),
    "save": lambda figures: (
        "the old or the new checkpoint loads, never neither, never a mixture; "
        f"{figures['tries_with_leftovers']} left files to remove"
    ),
    "trainer-save": lambda figures: (
        f"the newest checkpoint is whole and bit-equal; {figures['tries_with_leftovers']} left files to remove"
    ),
    "link": lambda figures: (
        f"each host names the other after {_spread(figures['named_after_seconds'])}, "
        f"with a time-out of {figures['timeout_seconds']:g} s; losses bit-equal after a restart"
    ),
    "lost-node": lambda figures: (
        f"named after {_spread(figures['named_after_seconds'])}, with a time-out of {figures['timeout_seconds']:g} s; "
        f"the others gone after {_spread(figures['others_gone_seconds'])}; two hosts went on, bit for bit as "
        "two ranks of one host do"
    ),
    "spot": lambda figures: (
        f"saved and gone after {_spread(figures['saved_and_gone_seconds'])}; one host went on, bit for bit as one "
        "rank does"
    ),
    "full-disk": lambda _: (
        "the run went on and saved again once there was room; the checkpoint before stayed; losses bit-equal"
    ),
    "stall": lambda _: "no rank was ended; the run went on after it; losses bit-equal",
    "slow-rank": lambda figures: (
        f"named after at most {max(figures['named_after_steps'])} steps, and nobody else"
    ),
    "slow-link": lambda figures: (
        f"named after at most {max(figures['named_after_steps'])} steps, and nothing else"
    ),
    "quiet": lambda _: "nobody was named",
    "worlds": lambda figures: (
        f"the next {figures['losses']} losses within {max(figures['largest_relative_difference'].values()):.1e}"
    ),
    "clean": lambda _: "no false alarm",
    "cost": lambda figures: (
        f"guard, handshake and watchdog take {figures['share_of_step']:.1%} of a step"
    ),
}


def versions() -> str:
    """Return the releases that tests ran with, the newest first."""
    rows = [
        (
            row["torch"].partition("+")[0],
            row["transformers"],
            row["trl"],
            row["python"],
            "the whole suite"
            if row["tests"] == ["tests"]
            else ", ".join(_of_tests(name) for name in row["tests"]),
            f"{row['passed']:,}",
            row["failed"],
            row["skipped"],
            row["date"],
        )
        for row in read("versions")["rows"]
    ]
    head = (
        "torch",
        "transformers",
        "TRL",
        "Python",
        "tests",
        "passed",
        "failed",
        "skipped",
        "date",
    )
    return table(head, rows, left=5)


def _of_tests(path: str) -> str:
    return (
        path.removeprefix("tests/")
        .removesuffix(".py")
        .replace("torch/", "")
        .replace("test_", "")
    )


def host_cost() -> str:
    """Processor time of a layer and step beside computing, on a ring and with plain FSDP2."""
    rows: list[Sequence[object]] = []
    for row in read("host-cost")["rows"]:
        further = [
            words
            for words, is_so in (
                ("LoRA", row["lora"]),
                ("new documents", row["new_documents"]),
                ("compiled", row.get("compiled", False)),
                ("2 slices", row.get("expert_slices", 1) > 1),
            )
            if is_so
        ]
        low, high = row["ratio_quartiles"]
        rows.append(
            (
                ", ".join([row["kind"], *further]),
                row["checkpoint"],
                row["ranks"],
                row["layers"],
                f"{row['ring']['step']:.1f}",
                f"{row['plain']['step']:.1f}",
                f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
                f"{row['ring']['calls']:,} / {row['plain']['calls']:,}",
            )
        )
    head = (
        "model",
        "checkpoint",
        "ranks",
        "layers",
        "ring, ms",
        "plain FSDP2, ms",
        "ratio (quartiles)",
        "calls of Python",
    )
    return table(head, rows, left=2)


def route_changes() -> str:
    """Shares of tokens whose experts rounding, or a step of training, changes."""
    rows: list[Sequence[object]] = [
        (
            f"a step, learning rate {row['learning_rate']:.0e}"
            if row["learning_rate"]
            else "rounding",
            row["dtype"],
            row["ranks"],
            f"{100 * row['choices']:.1f}%",
            f"{100 * row['tokens']:.1f}%",
        )
        for row in read("route-changes-cpu")["rows"]
    ]
    head = (
        "what changes",
        "dtype",
        "ranks",
        "choices of a layer",
        "tokens, in any layer",
    )
    return table(head, rows, left=2)


def log_prob_gap() -> str:
    """Noise of a token's log-probability, and how many tokens it takes until a completion's weight leaves [0.5, 2]."""
    # Chunks of the loss change nothing as a rule; rows that are equal but for them are one.
    chunks: dict[str, list[str]] = {}
    for row in read("log-prob-gap-cpu")["rows"]:
        chunk = f"{row.pop('loss_chunk_tokens'):,}"
        chunks.setdefault(json.dumps(row), []).append(chunk)
    rows: list[Sequence[object]] = [
        (
            row["dtype"],
            row["ranks"],
            " or ".join(of_row),
            f"{row['length']:,}",
            f"{row['mean']:.1e}",
            f"{row['deviation']:.1e}",
            f"{row['largest']:.1e}",
            f"{row['weight']:.4g}",
            f"{row['leaves_tokens']:,.0f}",
        )
        for text, of_row in chunks.items()
        for row in [json.loads(text)]
    ]
    head = (
        "dtype",
        "ranks",
        "tokens of a chunk",
        "tokens",
        "mean difference",
        "standard deviation",
        "largest",
        "weight of the completion",
        "weight leaves [0.5, 2] at tokens",
    )
    return table(head, rows)


def vllm_rollouts() -> str:
    """Trainers with a real vLLM on rings against TRL's on one process, by the weights that are handed over."""
    rows: list[Sequence[object]] = [
        (
            row["trainer"],
            row["way"],
            f"{row['replicate']} x {row['ranks'] // row['replicate']}",
            f"{row['equal_completions']} of {row['steps']}"
            if "equal_completions" in row
            else "",
            *(
                f"{row[name]:.1e}" if name in row else ""
                for name in (
                    "grad_norm",
                    "loss",
                    "weights",
                    "ratio",
                    "logp_difference",
                )
            ),
            f"{row['greedy_equal']} of {row['greedy_prompts']}",
            f"{row['hand_over_seconds']:.1f} s",
        )
        for row in read("vllm-rollouts-cpu")["rows"]
    ]
    head = (
        "trainer",
        "handed over",
        "rings x ranks",
        "steps with equal completions",
        "gradient norms",
        "losses, absolute",
        "weights",
        "ratios",
        "largest log-probability difference",
        "greedy answers equal",
        "a hand-over",
    )
    return table(head, rows)
