"""The paper's overlap law, measured: two ranks in network namespaces of their own, joined by a link of limited rate.

Each rank computes on its block of c tokens while the other's block is on its way, so a hop hides its transfer when

    4 c^2 H D / F >= 2 c G D s / B,    that is    c >= (s / 2) (G / H) F / B

with H query heads, G key/value heads, head size D, s bytes a number, F FLOP/s and B bytes/s; with bfloat16 and as many
key/value heads as query heads, c >= F / B (Liu, Zaharia, Abbeel 2023, section 3.2).

    python -m benchmarks.overlap

Linux, root, iproute2 and util-linux (``benchmarks.namespaces``).
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from matplotlib import pyplot

import ringspan as rs
from benchmarks import namespaces
from benchmarks.namespaces import (
    LINK,
    ask,
    link,
    namespaced,
    path,
    rank_command,
    run,
    serve,
    swap,
)
from ringspan.measure.machine import describe_machine, timed
from ringspan.torch.engine.transport.exchange import COUNTERS

RESULT: Final = Path(__file__).parent / "results" / "overlap-cpu.json"
PICTURE: Final = Path(__file__).parents[1] / "docs" / "overlap.svg"
TOKENS: Final = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)
# Two-byte numbers halve the constant before F / B, four query heads on a key/value head divide it by four.
CURVES: Final[tuple[dict[str, Any], ...]] = (
    {"gigabits": 0.25},
    {"gigabits": 0.5},
    {"gigabits": 1},
    {"gigabits": 1, "dtype": "bfloat16"},
    {"gigabits": 0.25, "heads": 4, "head_dim": 32},
)
SHOWN: Final = 0.1  # share of a transfer that may show when it counts as hidden


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One curve: a link's rate, the shape of the attention and the tokens a rank to try."""

    gigabits: float
    dtype: str = "float32"
    heads: int = 1
    # one makes one group of heads, so that a message is the whole block of a hop
    kv_heads: int = 1
    head_dim: int = 128
    tokens: tuple[int, ...]
    repeats: int

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    def flops(self, tokens: int) -> int:
        """FLOPs of one hop: every query of a block with every key of another."""
        return 4 * tokens**2 * self.heads * self.head_dim


def why_not() -> str | None:
    """What this machine lacks to join two namespaces by a limited link; None when it can."""
    trial = (
        f"ip link add name {LINK} type veth peer name other && {shlex.join(_limit(1))}"
    )
    return namespaces.why_not("tc", trial=trial)


def measure(sweeps: list[Sweep]) -> list[dict[str, Any]]:
    """Each sweep's rows and where its transfers stop showing, from two ranks that live as long as this call."""
    with (
        tempfile.TemporaryDirectory(prefix="ringspan-overlap-") as folder,
        ExitStack() as stack,
    ):
        commands = (
            rank_command("benchmarks.overlap", rank, folder) for rank in range(2)
        )
        ranks = [stack.enter_context(namespaced(command)) for command in commands]
        one, other = ((LINK, process.pid) for process in ranks)
        link(one, other)
        results = ask(ranks, [asdict(sweep) for sweep in sweeps])
        return [
            asdict(sweep) | result
            for sweep, result in zip(sweeps, results, strict=True)
        ]


def _answer(sweeps: list[dict[str, Any]], alone: Any) -> list[dict[str, Any]]:
    """Runs on each rank."""
    return [
        _sweep(
            Sweep(**{**sweep, "tokens": tuple(sweep["tokens"])}), dist.get_rank(), alone
        )
        for sweep in sweeps
    ]


def _sweep(sweep: Sweep, rank: int, alone: Any) -> dict[str, Any]:
    """Seconds of a hop's computation, of its transfer and of what of it shows; medians of interleaved repeats."""
    run(*_limit(sweep.gigabits))
    times: dict[int, dict[str, list[float]]] = {c: {} for c in sweep.tokens}
    for repeat in range(sweep.repeats + 1):
        for tokens in sweep.tokens:
            # the first round warms up
            found = _once(sweep, tokens, rank, alone)
            for name, seconds in found.items() if repeat else ():
                times[tokens].setdefault(name, []).append(seconds)
    medians = {
        c: {name: median(values) for name, values in found.items()}
        for c, found in times.items()
    }
    rows = [
        {
            "tokens": c,
            **found,
            "exposed_share": found["exposed_seconds"] / found["transfer_seconds"],
        }
        for c, found in medians.items()
    ]
    # F is what a rank reaches in the ring while it does not wait: on a CPU the network takes its share of the cores.
    flops = median(
        2 * sweep.flops(c) / (row["ring_seconds"] - row["exposed_seconds"])
        for c, row in medians.items()
    )
    rate = median(
        c * sweep.bytes_per_token / row["transfer_seconds"]
        for c, row in medians.items()
    )
    predicted = sweep.itemsize / 2 * sweep.kv_heads / sweep.heads * flops / rate
    crossing = crossed([(row["tokens"], row["exposed_share"]) for row in rows])
    return {
        "rows": rows,
        "flops_per_second": flops,
        "flops_per_second_alone": median(
            sweep.flops(c) / row["compute_seconds"] for c, row in medians.items()
        ),
        "bytes_per_second": rate,
        "predicted_tokens": predicted,
        "crossing_tokens": crossing,
        "crossing_over_predicted": crossing / predicted if crossing else None,
    }


def _once(sweep: Sweep, tokens: int, rank: int, alone: Any) -> dict[str, float]:
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(1, heads, tokens, sweep.head_dim, generator=generator).to(
            getattr(torch, sweep.dtype)
        )
        for heads in (sweep.heads, sweep.kv_heads, sweep.kv_heads)
    )
    block = torch.empty(tokens * sweep.bytes_per_token, dtype=torch.uint8)
    attention = partial(rs.ring_attention, q, k, v, mask=rs.full(), layout="contiguous")

    with torch.no_grad():
        compute = timed(partial(attention, group=alone), threads=1)
        transfer = timed(partial(swap, block, 1 - rank), threads=1)
        before = replace(COUNTERS)
        ring = timed(attention, threads=1)
    assert COUNTERS.sent_bytes - before.sent_bytes == block.nbytes, (
        "a hop sends its whole block once"
    )
    exposed = torch.tensor(COUNTERS.exposed_seconds - before.exposed_seconds)
    dist.all_reduce(exposed, dist.ReduceOp.MAX)
    return {
        "compute_seconds": compute,
        "transfer_seconds": transfer,
        "ring_seconds": ring,
        "exposed_seconds": float(exposed),
    }


def crossed(shares: list[tuple[int, float]]) -> float | None:
    """Tokens a rank from which on transfers are hidden; None when the sweep does not reach both sides.

    Where at most ``SHOWN`` shows, linear in log c between the last point above and the one after; the law has that
    share at 1 - ``SHOWN`` of the crossing.
    """
    above = [index for index, (_, share) in enumerate(shares) if share > SHOWN]
    if not above or above[-1] + 1 == len(shares):
        return None
    (c0, high), (c1, low) = shares[above[-1]], shares[above[-1] + 1]
    return c0 * (c1 / c0) ** ((high - SHOWN) / (high - low)) / (1 - SHOWN)


def _limit(gigabits: float) -> list[str]:
    """The command that limits this end of the link; a small burst, so that small blocks see the rate too."""
    rate = f"{round(gigabits * 1e9)}bit"
    return [
        *(path("tc"), "qdisc", "replace", "dev", LINK, "root"),
        *("tbf", "rate", rate, "burst", "32kb", "latency", "50ms"),
    ]


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Left: what shows of a transfer against the block size, with the predicted crossings. Right: against c over the
    predicted crossing, where the law says max(0, 1 - x) for every curve.
    """
    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "overlap"}
    figure, (by_tokens, by_ratio) = pyplot.subplots(
        1, 2, figsize=(11, 4.6), sharey=True, layout="constrained"
    )
    for number, result in enumerate(results):
        tokens, shares = zip(
            *((row["tokens"], row["exposed_share"]) for row in result["rows"]),
            strict=True,
        )
        predicted, colour = result["predicted_tokens"], f"C{number}"
        label = f"{result['gigabits']:g} Gbit/s, {result['dtype']}"
        label += (
            f", {result['heads']} heads on {result['kv_heads']}"
            if result["heads"] > result["kv_heads"]
            else ""
        )
        by_tokens.plot(tokens, shares, "o-", color=colour, markersize=4, label=label)
        by_tokens.axvline(predicted, color=colour, linestyle="--", linewidth=1)
        by_ratio.plot(
            [c / predicted for c in tokens],
            shares,
            "o",
            color=colour,
            markersize=4,
            label=label,
        )
    xs = [0.02 * step for step in range(1, 200)]
    by_ratio.plot(
        xs,
        [max(0.0, 1 - x) for x in xs],
        color="black",
        linewidth=1,
        label="the law: 1 - x, then 0",
    )
    by_ratio.axvspan(1 / 1.5, 1.5, color="black", alpha=0.07, linewidth=0)
    by_tokens.set(
        xlabel="tokens per rank (c); dashed: predicted crossing",
        ylabel="share of the transfer that shows",
    )
    by_ratio.set(
        xlabel="c over the predicted crossing; shaded: within a factor 1.5",
        xlim=(0.05, 4),
    )
    for axes in (by_tokens, by_ratio):
        axes.set_xscale("log", base=2)
        axes.set_ylim(-0.05, 1.25)
        axes.grid(alpha=0.3)
    ticks = [2**power for power in range(-4, 3)]
    by_ratio.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ticks = sorted(
        {
            row["tokens"]
            for result in results
            for row in result["rows"]
            if row["tokens"].bit_count() == 1
        }
    )
    by_tokens.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    figure.legend(
        *by_ratio.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Measure, print a line a curve, keep the result and draw it."""
    parser = argparse.ArgumentParser(
        description="Measure the overlap law over a rate-limited link (Linux, root)."
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=TOKENS,
        help="tokens a rank to try, ascending",
    )
    parser.add_argument(
        "--gigabits",
        type=float,
        nargs="*",
        default=[],
        help="only these rates (Gbit/s), in float32",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="interleaved repeats; the medians are reported",
    )
    parser.add_argument("--output", type=Path, default=RESULT, help="the JSON file")
    parser.add_argument(
        "--picture",
        type=Path,
        default=None,
        help=f"draw an SVG too, such as {PICTURE.name}",
    )
    options = parser.parse_args()
    reason = why_not()
    if reason:
        sys.exit(f"overlap: {reason}")
    # so that the ranks are ended then too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    curves = [{"gigabits": gigabits} for gigabits in options.gigabits] or CURVES
    sweeps = [
        Sweep(tokens=tuple(options.tokens), repeats=options.repeats, **curve)
        for curve in curves
    ]
    results = measure(sweeps)
    row = {
        "command": shlex.join(["python", "-m", "benchmarks.overlap", *sys.argv[1:]]),
        "result": {"sweeps": results, "machine": describe_machine()},
    }
    options.output.write_text(json.dumps([row], indent=1) + "\n")
    for result in results:
        name = f"{result['gigabits']:g} Gbit/s {result['dtype']} {result['heads']}:{result['kv_heads']} heads"
        found = result["crossing_tokens"]
        said = (
            f"crossing {found:,.0f}, {result['crossing_over_predicted']:.2f}x"
            if found
            else "no crossing in the sweep"
        )
        print(
            f"{name}: predicted {result['predicted_tokens']:,.0f} tokens per rank, {said}"
        )
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve(int(sys.argv[2]), 2, sys.argv[3], _answer)
    else:
        main()
