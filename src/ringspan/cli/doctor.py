"""``ringspan doctor``: what this machine or cluster has, how fast it is, and what is wrong with it."""

import json
import os
from typing import Annotated, Any

import typer

EPILOG = (
    "Example: ringspan doctor --ranks 4. Before a job on a cluster: "
    "torchrun --nnodes 2 --nproc-per-node 8 ... -m ringspan doctor"
)


def command(
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Processes of this machine to try; default: one a CUDA device, else two. Not under torchrun."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Say what this machine has (devices, kernels, back ends), how fast it is, and what is missing or wrong.

    Ranks are started, measure the links between them, compare their versions and clocks, and check the ring against
    float64. Under torchrun the ranks of the job do so. Exit code 0 when it can train, 1 when something stops it.
    """
    from rich.console import Console

    from ringspan.bench.doctor import examine, examine_job
    from ringspan.core.errors import ConfigError

    with Console(stderr=True, quiet=as_json).status("looking at devices, links and kernels"):
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if ranks is not None:
                raise ConfigError(f"--ranks {ranks} under torchrun, which has started the processes; leave it out")
            result, is_first = examine_job()
        else:
            result, is_first = examine(ranks), True
    if is_first:
        if as_json:
            print(json.dumps(result))
        else:
            _show(result)
    if not result["can_train"]:
        raise typer.Exit(1)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    known = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    console.print(f"[bold]versions[/]  {known}", soft_wrap=True)
    _table(console, "devices", ["device", "memory"], [_device(each) for each in result["devices"]])
    has = [name for name, available in result["backends"].items() if available]
    console.print(f"[bold]process groups[/]  {', '.join(has) or 'none'}")
    rows = [
        [name, "[green]yes[/]" if kernel["available"] else "no", kernel["why_not"] or _cases(kernel["serves"])]
        for name, kernel in result["kernels"].items()
    ]
    _table(console, "kernels", ["kernel", "runs", "computes here"], rows)
    speeds = [[m["what"], m["dtype"], f"{m['flops'] / 1e12:,.3g}"] for m in result["measured_flops"]]
    _table(console, "speed of the slowest rank", ["", "dtype", "TFLOP/s"], speeds)
    if result["cluster"]:
        _show_cluster(console, result)
    for each in result["missing"]:
        console.print(f"not installed: {each['name']}, for {each['needed_for']}: {each['remedy']}", markup=False)
    for problem in result["problems"]:
        colour = "red" if problem["stops"] else "yellow"
        console.print(f"[{colour}]![/] ", end="")
        console.print(f"{problem['what']}; {problem['remedy']}", markup=False, soft_wrap=True)
    console.print("[green]can train[/]" if result["can_train"] else "[red]cannot train[/]")


def _show_cluster(console: Any, result: dict[str, Any]) -> None:
    cluster = result["cluster"]
    links = {link["from"]: f"{link['bytes_per_second'] / 1e9:.2f}" for link in cluster["links"]}
    error_ms = 1e3 * cluster["clock_uncertainty_seconds"]
    rows = [
        [str(rank), fact["host"], fact["device"], links.get(rank, ""), f"{1e3 * offset:+.0f}", _ports(fact["listens"])]
        for rank, (fact, offset) in enumerate(zip(cluster["ranks"], cluster["clock_offset_seconds"], strict=True))
    ]
    headers = ["rank", "host", "device", "GB/s to the next", f"clock ms (± {error_ms:.0f})", "listens on"]
    _table(console, "ranks", headers, rows)
    console.print(f"ring against float64: relative error {cluster['ring_error']:.1e}")
    bandwidth = result["bandwidth_bytes_per_second"]
    if bandwidth:
        reached = next(m["flops"] for m in result["measured_flops"] if m["what"] == "attention")
        console.print(
            f"all links at once {bandwidth / 1e9:.2f} GB/s each way: blocks of {result['min_block_tokens']:,} tokens "
            f"(F/B) hide their travel, with the attention that is reached {round(reached / bandwidth):,}",
            soft_wrap=True,
        )


def _device(device: dict[str, Any]) -> list[str]:
    cores = f", {device['cores']} cores" if "cores" in device else ""
    return [f"{device['kind']}: {device['name']}{cores}", f"{device['memory_bytes'] / 1e9:,.1f} GB"]


def _cases(serves: dict[str, float]) -> str:
    return "; ".join(name if share == 1 else f"{name} {share:.0%}" for name, share in serves.items()) or "nothing"


def _ports(listens: list[str] | None) -> str:
    return "not known" if listens is None else ", ".join(listens) or "nothing"


def _table(console: Any, title: str, headers: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
