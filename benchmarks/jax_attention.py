"""Attention of the JAX back end against the paper's package and PyTorch's SDPA, interleaved, as JSON.

    python -m pip install ringattention einops     # the paper's package; without it that column is left out
    python benchmarks/jax_attention.py --lengths 4096 8192 16384 > benchmarks/results/jax-attention-cpu.json

Causal, float32, batch 1, forward and backward, on virtual CPU devices; SDPA on one process with as many threads. The
package runs with several chunk sizes; ratios are those of our best of --chunks. All JAX functions are compiled with
--xla-flags. Leave the machine alone meanwhile.
"""

import argparse
import json
import os
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringspan as rs
from ringspan.jax import init_mesh, ring_attention
from ringspan.measure.machine import describe_machine

HEADS, HEAD_DIM = 8, 64
# A device of its own for each core, so that products need no further threads; and the whole width of AVX-512.
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_cpu_prefer_vector_width=512"
# the chunk is an argument of the package, so it is tried as ours is
PACKAGE_CHUNKS = (
    256,
    512,
    1024,
)


def package_attention() -> Callable[..., Any] | None:
    """The function of the paper's package, which was written for another JAX."""
    bridge = types.SimpleNamespace(get_backend=jax.extend.backend.get_backend)
    jax.lib.xla_bridge = bridge  # type: ignore[attr-defined]
    try:
        from ringattention import ringattention_jax
    except (ImportError, AttributeError) as error:
        print(f"without the paper's package: {error}", file=sys.stderr)
        return None
    return ringattention_jax


def contenders(
    length: int, ranks: int, chunks: list[tuple[int, int]]
) -> dict[str, Any]:
    """Compiled functions of (q, k, v, dout), tokens in the second dimension or the third as each wants them."""
    mesh = init_mesh(sp=ranks)
    split = NamedSharding(mesh, P(None, None, "sp"))
    generator = np.random.default_rng(0)
    x = [
        generator.standard_normal((1, HEADS, length, HEAD_DIM), dtype=np.float32)
        for _ in range(4)
    ]
    made: dict[str, Any] = {}

    def compiled(
        local: Callable[..., Any], spec: P, inputs: list[Any], *, check_vma: bool = True
    ) -> Any:
        attention = jax.shard_map(
            local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma
        )

        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, differentiate = jax.vjp(attention, q, k, v)
            return out, *differentiate(dout)

        return jax.jit(both).lower(*inputs).compile(), inputs

    order = rs.Layout("zigzag", length, ranks).permutation
    ours = [jax.device_put(a[:, :, order], split) for a in x]
    for query_chunk, key_chunk in chunks:
        local = partial(ring_attention, query_chunk=query_chunk, key_chunk=key_chunk)
        made[f"ringspan {query_chunk} x {key_chunk}"] = compiled(
            local, P(None, None, "sp"), ours
        )
    if package := package_attention():
        theirs = [
            jax.device_put(a.swapaxes(1, 2), NamedSharding(mesh, P(None, "sp")))
            for a in x
        ]
        for chunk in PACKAGE_CHUNKS:
            options = {
                "causal_block_size": 1,
                "deterministic": True,
                "dropout_rng": None,
                "attn_pdrop": 0.0,
                "query_chunk_size": chunk,
                "key_chunk_size": chunk,
                "dtype": jnp.float32,
                "precision": None,
                "policy": jax.checkpoint_policies.nothing_saveable,
                "prevent_cse": True,
            }

            def local_package(q: Any, k: Any, v: Any, options: Any = options) -> Any:
                bias = jnp.zeros((1, 1, 1, length), jnp.float32)
                segments = jnp.zeros((1, length), jnp.int32)
                return package(q, k, v, bias, segments, None, "sp", True, options)

            try:
                made[f"ringattention {chunk}"] = compiled(
                    local_package, P(None, "sp"), theirs, check_vma=False
                )
            except (
                Exception
            ) as error:  # a package of another time may fail in ways of its own
                print(
                    f"ringattention {chunk}: {type(error).__name__}: {str(error)[:200]}",
                    file=sys.stderr,
                )
    return made


def run(
    length: int, ranks: int, repeats: int, chunks: list[tuple[int, int]]
) -> dict[str, Any]:
    """Medians of interleaved repeats, the first of which warms up."""
    functions = contenders(length, ranks, chunks)
    generator = torch.Generator().manual_seed(0)
    *inputs, dout = (
        torch.randn(1, HEADS, length, HEAD_DIM, generator=generator) for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in inputs]
    torch.set_num_threads(ranks)

    def sdpa() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.autograd.grad(out, inputs, dout)

    seconds: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for name, call in {
            **{n: partial(f, *x) for n, (f, x) in functions.items()},
            "sdpa": sdpa,
        }.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds.setdefault(name, []).append(time.perf_counter() - started)
    medians = {name: median(times[1:]) for name, times in seconds.items()}
    temporaries = {
        n: f.memory_analysis().temp_size_in_bytes for n, (f, _) in functions.items()
    }
    best = min(
        (name for name in medians if name.startswith("ringspan")),
        key=medians.__getitem__,
    )
    return {
        "length": length,
        "seconds": medians,
        "temporary_bytes_per_rank": temporaries,
        "ratio_to": {name: medians[best] / time for name, time in medians.items()},
        "best": best,
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--chunks",
        nargs="+",
        default=["256x256", "512x512"],
        help="query x key chunks of ringspan to try",
    )
    parser.add_argument(
        "--xla-flags",
        default=XLA_FLAGS,
        help="of the compiler, for all JAX functions; '' for none",
    )
    options = parser.parse_args()
    # read with the devices
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {options.xla_flags}".strip()
    )
    jax.config.update("jax_num_cpu_devices", options.ranks)
    chunks = [(int(a), int(b)) for a, b in (pair.split("x") for pair in options.chunks)]
    rows = [
        run(length, options.ranks, options.repeats, chunks)
        for length in options.lengths
    ]
    facts = {
        "jax": jax.__version__,
        "xla_flags": os.environ["XLA_FLAGS"],
        "machine": describe_machine(),
    }
    print(json.dumps({"ranks": options.ranks, "rows": rows} | facts))


if __name__ == "__main__":
    main()
