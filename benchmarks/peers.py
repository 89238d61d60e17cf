"""Compare with other ring attentions that run on a CPU: seconds, the ratio to one process, and errors against float64.

The peers live in an environment of their own, whose python is the one argument; ours runs under this one:

    python -m venv peers
    peers/bin/pip install torch ring-attention-pytorch jax ringattention
    python benchmarks/peers.py --python peers/bin/python

Every contender is a process or two that wait while the others work, so that all take turns within a repeat: forward
and backward of causal attention, a sequence split over two ranks of one thread each, against one process of two
threads. What the environment lacks, or a contender that raises, is named with its reason and left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

# A worker runs in the peers' environment: whatever is not in both is imported where it is used.

RESULT: Final = Path(__file__).parent / "results" / "peers-cpu.json"
RANKS: Final = 2
RESULTS: Final = ("out", "dq", "dk", "dv")
Arrays = list[np.ndarray]
# One forward and backward, and how to read what it gave: positions, then out, dq, dk and dv as (B, T, H, D).
Worker = tuple[Callable[[], Any], Callable[[Any], Arrays]]


@dataclass(frozen=True)
class Contender:
    """Who computes: ``make(inputs, dtype, rank)`` prepares one of its processes."""

    make: Callable[[Arrays, str, int], Worker]
    packages: tuple[str, ...]
    ranks: int = RANKS
    threads: int = 1
    ours: bool = False


def compare(
    python: str, length: int, dtype: str, heads: int, head_dim: int, repeats: int
) -> list[dict[str, Any]]:
    """A row a contender: medians of interleaved repeats, the ratio to one process, and relative errors."""
    with (
        tempfile.TemporaryDirectory(prefix="ringspan-peers-") as name,
        ExitStack() as stack,
    ):
        folder = Path(name)
        generator = np.random.default_rng(0)
        inputs = generator.standard_normal(
            (4, 1, length, heads, head_dim), dtype=np.float32
        )
        np.save(folder / "inputs.npy", inputs)
        exact = _exact(folder, dtype)
        rows = {who: _row(who, python) for who in CONTENDERS}
        running: dict[str, list[subprocess.Popen[str]]] = {}
        for who, row in rows.items():
            if row.get("versions"):
                running[who] = stack.enter_context(_ranks(who, python, folder, dtype))
                _attempt(running, row, lambda who=who: _ask(running[who], "ready"))
        times: dict[str, list[float]] = {who: [] for who in running}
        for repeat in range(repeats + 1):
            for who in list(running):
                seconds = _attempt(
                    running, rows[who], partial(_ask, running[who], "time")
                )
                if repeat and seconds is not None:  # the first round warms up
                    times[who].append(seconds)
        for who in list(running):
            if (
                _attempt(running, rows[who], partial(_ask, running[who], "save"))
                is not None
            ):
                ratios = [a / b for a, b in zip(times[who], times["sdpa"], strict=True)]
                rows[who] |= {"seconds": median(times[who]), "ratio": median(ratios)}
                rows[who] |= {"errors": _errors(folder, who, exact)}
        return list(rows.values())


def _row(who: str, python: str) -> dict[str, Any]:
    """Versions of a contender's packages, or why it cannot run."""
    contender = CONTENDERS[who]
    query = (
        "import json, importlib.metadata as m; "
        f"print(json.dumps({{n: m.version(n) for n in {contender.packages}}}))"
    )
    command = [sys.executable if contender.ours else python, "-c", query]
    done = subprocess.run(command, capture_output=True, text=True)
    row: dict[str, Any] = {
        "contender": who,
        "versions": json.loads(done.stdout) if not done.returncode else None,
    }
    return (
        row
        if row["versions"]
        else row | {"skipped": done.stderr.strip().splitlines()[-1]}
    )


def _attempt(
    running: dict[str, Any], row: dict[str, Any], ask: Callable[[], float]
) -> float | None:
    """What a contender answers; when it raises, its reason goes into its row and it takes no further part."""
    try:
        return ask()
    except RuntimeError as error:
        row["skipped"] = str(error)
        del running[row["contender"]]
        return None


@contextmanager
def _ranks(
    who: str, python: str, folder: Path, dtype: str
) -> Iterator[list[subprocess.Popen[str]]]:
    contender = CONTENDERS[who]
    command = [
        sys.executable if contender.ours else python,
        __file__,
        "--serve",
        who,
        str(folder),
        dtype,
    ]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(contender.ranks)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _ask(ranks: list[subprocess.Popen[str]], what: str) -> float:
    """Tell every rank what to do; the slowest one's seconds."""
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write(what + "\n")
        process.stdin.flush()
    answers = []
    for process in ranks:
        assert process.stdout is not None
        line = process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it ended without a word"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        answers.append(answer["seconds"])
    return max(answers)


def _serve(who: str, folder: Path, dtype: str, rank: int) -> None:
    """One rank of a contender: a line of JSON for each line on the input."""
    answers = os.fdopen(os.dup(1), "w")  # what a peer prints goes to the error output
    os.dup2(2, 1)
    contender = CONTENDERS[who]
    step, read, results = None, None, None
    for line in sys.stdin:
        try:
            seconds = 0.0
            if line == "ready\n":
                step, read = contender.make(_inputs(folder, dtype), dtype, rank)
            elif line == "time\n":
                started = time.perf_counter()
                results = step()
                seconds = time.perf_counter() - started
            elif line == "save\n":
                np.savez(folder / f"{who}-{rank}.npz", *read(results))
            answer = {"seconds": seconds}
        except Exception as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            answer = {"error": f"{type(error).__name__}: {said[0] if said else ''}"}
        print(json.dumps(answer), file=answers, flush=True)


def _inputs(folder: Path, dtype: str) -> Arrays:
    """q, k, v and dout (B, T, H, D) in float32, rounded to the dtype that all of them will be given in."""
    inputs = np.load(folder / "inputs.npy")
    if dtype == "bfloat16":
        bits = inputs.view(np.uint32)
        inputs = (
            ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000)
            .astype(np.uint32)
            .view(np.float32)
        )
    return list(inputs)


def _exact(folder: Path, dtype: str) -> Arrays:
    step, read = _sdpa(_inputs(folder, dtype), "float64", 0)
    return read(step())[1:]


def _errors(folder: Path, who: str, exact: Arrays) -> dict[str, float]:
    """||x - exact|| / ||exact|| of each result, over the whole sequence."""
    squares = np.zeros(len(RESULTS))
    for rank in range(CONTENDERS[who].ranks):
        positions, *found = np.load(folder / f"{who}-{rank}.npz").values()
        parts = zip(found, exact, strict=True)
        squares += [
            np.square(x.astype(np.float64) - y[:, positions]).sum() for x, y in parts
        ]
    return {
        name: float(np.sqrt(square / np.square(y).sum()))
        for name, square, y in zip(RESULTS, squares, exact, strict=True)
    }


# The contenders.


def _sdpa(inputs: Arrays, dtype: str, rank: int) -> Worker:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(2)
    q, k, v, dout = _heads_first(inputs, dtype)

    def step() -> Any:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    return step, partial(_read_heads_first, np.arange(inputs[0].shape[1]))


def _ringspan(inputs: Arrays, dtype: str, rank: int) -> Worker:
    import torch
    import torch.distributed as dist

    import ringspan as rs

    _join(rank)
    layout = rs.Layout("zigzag", inputs[0].shape[1], RANKS)
    q, k, v, dout = _heads_first([x[:, layout.positions(rank)] for x in inputs], dtype)

    def step() -> Any:
        dist.barrier()
        out = rs.ring_attention(q, k, v, mask=rs.causal(), layout=layout)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    return step, partial(_read_heads_first, layout.positions(rank))


def _context_parallel(inputs: Arrays, dtype: str, rank: int) -> Worker:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional

    _join(rank)
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = [x.detach() for x in _heads_first(inputs, dtype)]
    positions = torch.arange(inputs[0].shape[1])

    def step() -> Any:
        dist.barrier()
        buffers = [x.clone() for x in (*whole, positions)]
        with context_parallel(
            mesh,
            buffers=buffers,
            buffer_seq_dims=[2, 2, 2, 2, 0],
            no_restore_buffers=set(buffers),
        ):
            q, k, v, dout, here = buffers
            for x in (q, k, v):
                x.requires_grad_()
            # Looked up in its module, where torch replaces it; a name bound before would attend within the shard.
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return [here, out, *torch.autograd.grad(out, (q, k, v), dout)]

    return step, lambda results: _read_heads_first(results[0].numpy(), results[1:])


def _ring_attention_pytorch(inputs: Arrays, dtype: str, rank: int) -> Worker:
    import torch
    import torch.distributed as dist
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    _join(rank)
    length = inputs[0].shape[1]
    positions = np.arange(length)[rank * length // RANKS : (rank + 1) * length // RANKS]
    q, k, v, dout = (
        torch.from_numpy(x[:, positions]).to(getattr(torch, dtype)).requires_grad_()
        for x in inputs
    )

    def step() -> Any:
        dist.barrier()
        out = ring_flash_attn(
            q, k, v, causal=True, ring_reduce_col=True, bucket_size=512
        )
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    return step, lambda results: [
        positions,
        *(x.detach().float().numpy() for x in results),
    ]


def _ringattention(inputs: Arrays, dtype: str, rank: int) -> Worker:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    # its import asks this module for the platform; newer JAX has it elsewhere

    if not hasattr(jax.lib, "xla_bridge"):
        from jax.extend import backend

        jax.lib.xla_bridge = backend
    from ringattention import ringattention

    options = {
        **{
            "causal_block_size": 1,
            "deterministic": True,
            "dropout_rng": None,
            "attn_pdrop": 0.0,
        },
        # fastest of 128 to 2,048
        **{
            "query_chunk_size": 256,
            "key_chunk_size": 256,
            "dtype": getattr(jnp, dtype),
        },
        **{
            "policy": jax.checkpoint_policies.nothing_saveable,
            "precision": None,
            "prevent_cse": False,
        },
    }

    def local(q: Any, k: Any, v: Any) -> Any:
        return ringattention(q, k, v, None, None, None, "ring", True, options)

    mesh = Mesh(np.array(jax.devices()), ("ring",))
    spec = PartitionSpec(None, "ring")
    attention = _shard_map(jax)(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    tensors = [
        jax.device_put(jnp.asarray(x, dtype), NamedSharding(mesh, spec)) for x in inputs
    ]

    @jax.jit
    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attention, q, k, v)
        return [out, *pull(dout)]

    return (
        lambda: jax.block_until_ready(both(*tensors)),
        lambda results: [
            np.arange(inputs[0].shape[1]),
            *(np.asarray(x.astype(jnp.float32)) for x in results),
        ],
    )


def _shard_map(jax: Any) -> Any:
    if hasattr(jax, "shard_map"):
        return partial(jax.shard_map, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return partial(shard_map, check_rep=False)


def _join(rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = Path(sys.argv[3], f"store-{sys.argv[2]}")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )


def _heads_first(inputs: Arrays, dtype: str) -> list[Any]:
    """(B, H, T, D) as a model's projections leave them: stored (B, T, H, D)."""
    import torch

    return [
        torch.from_numpy(x).to(getattr(torch, dtype)).transpose(1, 2).requires_grad_()
        for x in inputs
    ]


def _read_heads_first(positions: np.ndarray, results: Any) -> Arrays:
    results = (x.detach().transpose(1, 2) for x in results)
    return [
        positions,
        *((x.float() if x.itemsize == 2 else x).numpy() for x in results),
    ]


CONTENDERS: Final = {
    "sdpa": Contender(_sdpa, ("torch",), ranks=1, threads=2, ours=True),
    "ringspan": Contender(_ringspan, ("ringspan", "torch"), ours=True),
    "ringattention": Contender(
        _ringattention, ("ringattention", "jax"), ranks=1, threads=2
    ),
    "ring-attention-pytorch": Contender(
        _ring_attention_pytorch, ("ring-attention-pytorch", "torch")
    ),
    "context_parallel": Contender(_context_parallel, ("torch",)),
}


def main() -> None:
    """Compare for each length and dtype, print a table and keep the rows."""
    parser = argparse.ArgumentParser(
        description="Compare with other ring attentions on two CPU cores."
    )
    parser.add_argument(
        "--python",
        required=True,
        help="the python of the environment that has the peers",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32", "bfloat16"],
        choices=["float32", "bfloat16"],
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="interleaved repeats; the medians are reported",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULT,
        help="the JSON file; rows of other cases in it stay",
    )
    options = parser.parse_args()
    from ringspan.measure.machine import describe_machine

    kept = json.loads(options.output.read_text()) if options.output.exists() else []
    for dtype in options.dtypes:
        for length in options.lengths:
            shape = {
                "length": length,
                "dtype": dtype,
                "heads": options.heads,
                "head_dim": options.head_dim,
            }
            rows = compare(options.python, **shape, repeats=options.repeats)
            words = [
                f"--{name.replace('_', '-')}{'s' * (name in ('length', 'dtype'))} {shape[name]}"
                for name in shape
            ]
            command = (
                "python benchmarks/peers.py --python peers/bin/python "
                f"{' '.join(words)} --repeats {options.repeats}"
            )
            kept = [other for other in kept if other["result"]["config"] != shape]
            kept.append(
                {
                    "command": command,
                    "result": {
                        "rows": rows,
                        "config": shape,
                        "machine": describe_machine(),
                    },
                }
            )
            options.output.write_text(json.dumps(kept, indent=1) + "\n")
            print(f"\n{length:,} tokens, {dtype}")
            for row in rows:
                if "skipped" in row:
                    print(f"{row['contender']:24} {row['skipped']}")
                else:
                    errors = " ".join(
                        f"{name} {error:.1e}" for name, error in row["errors"].items()
                    )
                    print(
                        f"{row['contender']:24} {row['seconds']:8.3f} s {row['ratio']:6.2f}  {errors}",
                        flush=True,
                    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        main()
