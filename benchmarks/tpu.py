"""What the compiler of a TPU makes of the JAX ring, without a TPU: memory of a device, and whether blocks travel
while kernels run, as JSON.

    python -m pip install 'jax[tpu]'      # libtpu: with it JAX compiles for TPUs on any machine
    python -m benchmarks.tpu

Forward and backward of causal attention, bfloat16, zigzag, 32 query heads on 8 key/value heads of 128. ``peak_bytes``
are a device's by the compiler's own count, arguments and results with it. ``covered`` is how many of the messages of
the compiled, scheduled program have a kernel (or, of plain XLA, a loop) between their start and their end. Nothing
runs: this says nothing about speed.
"""

import argparse
import json
import re
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.jax_llama import Llama, LlamaConfig, mean_loss, shardings
from ringspan.jax import sharded_ring_attention
from ringspan.jax.mesh import BATCH_AXES
from ringspan.measure.machine import describe_machine
from ringspan.plan.model.configs import MODELS

RESULT: Final = Path(__file__).parent / "results" / "tpu-compiled.json"
CASES: Final = (
    ("v5e:4x4", 8192, "xla"),
    ("v5e:4x4", 8192, "pallas"),
    ("v5e:4x4", 65_536, "xla"),
    ("v5e:4x4", 65_536, "pallas"),
    ("v4:2x2x4", 16_384, "pallas"),
    ("v5p:2x2x4", 65_536, "pallas"),
    ("v6e:4x4", 65_536, "pallas"),
)
_SHAPE: Final = MODELS["llama-3.1-8b"]
LLAMA: Final = LlamaConfig(
    vocab_size=_SHAPE.vocab,
    hidden_size=_SHAPE.hidden,
    intermediate_size=_SHAPE.intermediate,
    num_hidden_layers=_SHAPE.layers,
    num_attention_heads=_SHAPE.attention.heads,
    num_key_value_heads=_SHAPE.attention.kv_heads,
    head_dim=_SHAPE.attention.head_dim,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=_SHAPE.tied,
    kernel="pallas",
)
LLAMA_CASES: Final = (("v5p:4x4x4", 1, 64, 1 << 20), ("v5p:4x4x4", 8, 8, 1 << 17))


def tpus(topology: str, **axes: int) -> Mesh:
    """A mesh of TPUs that are described and not there; one ring when no axes are given."""
    devices = np.array(topologies.get_topology_desc(topology, platform="tpu").devices)
    axes = axes or {"sp": devices.size}
    return Mesh(
        devices.reshape(tuple(axes.values())),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )


def both_passes(
    mesh: Mesh,
    tokens: int,
    heads: tuple[int, int],
    size: int,
    dtype: Any,
    **options: Any,
) -> Any:
    """Forward and backward of so many tokens per device, lowered for a TPU."""
    split = NamedSharding(mesh, P(None, None, "sp"))
    length = tokens * mesh.shape["sp"]
    inputs = [
        jax.ShapeDtypeStruct((1, h, length, size), dtype, sharding=split)
        for h in (*heads, heads[1], heads[0])
    ]

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, differentiate = jax.vjp(
            lambda *x: sharded_ring_attention(*x, mesh=mesh, **options), q, k, v
        )
        return out, *differentiate(dout)

    return lowered(both, *inputs)


def lowered(function: Any, *inputs: Any) -> Any:
    """A function of arrays that are only described, as JAX would hand it to the compiler of a TPU."""
    with patch.object(jax, "default_backend", lambda: "tpu"):
        return jax.jit(function).trace(*inputs).lower(lowering_platforms=("tpu",))


def covered_messages(program: str) -> list[bool]:
    """For each message of a scheduled program, whether anything is computed between its start and its end."""
    lines, started, found = program.splitlines(), dict[str, int](), list[bool]()
    for number, line in enumerate(lines):
        if start := re.search(r"%(collective-permute-start[\w.]*) = ", line):
            started[start[1]] = number
        if done := re.search(
            r"collective-permute-done\(%(collective-permute-start[\w.]*)\)", line
        ):
            between = lines[started.pop(done[1]) : number]
            found.append(
                any("tpu_custom_call" in one or " while(" in one for one in between)
            )
    assert not started, "a message that does not end"
    return found


def measure(topology: str, tokens: int, kernel: str) -> dict[str, Any]:
    """Attention alone."""
    mesh = tpus(topology)
    options = {"kernel": kernel, "query_chunk": 512, "key_chunk": 512}
    found = compiled(both_passes(mesh, tokens, (32, 8), 128, jnp.bfloat16, **options))
    return {
        "topology": topology,
        "ring": mesh.size,
        "tokens_per_device": tokens,
        "kernel": kernel,
        **found,
    }


def measure_llama(topology: str, fsdp: int, ring: int, length: int) -> dict[str, Any]:
    """Loss and gradients of the model."""
    mesh = tpus(topology, dp=1, fsdp=fsdp, tp=1, sp=ring)
    weights = nnx.eval_shape(
        lambda: Llama(
            LLAMA, {n: jnp.zeros(x, jnp.bfloat16) for n, x in LLAMA.shapes().items()}
        )
    )
    graph, state = nnx.split(weights)
    state = jax.tree.map(
        lambda x, split: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
        state,
        shardings(state, mesh),
    )
    split = NamedSharding(mesh, P(BATCH_AXES, "sp"))
    ids = jax.ShapeDtypeStruct((fsdp, length), jnp.int32, sharding=split)
    batch = dict.fromkeys(("input_ids", "position_ids", "shift_labels"), ids)
    found = compiled(lowered(jax.value_and_grad(mean_loss(graph, mesh)), state, batch))
    return {
        "topology": topology,
        "fsdp": fsdp,
        "ring": ring,
        "tokens_per_device": length // ring,
        **found,
    }


def compiled(program: Any) -> dict[str, Any]:
    """What the compiler says of it."""
    started = time.perf_counter()
    result = program.compile()
    memory, messages = result.memory_analysis(), covered_messages(result.as_text())
    return {
        "messages": len(messages),
        "covered": sum(messages),
        "peak_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "compile_seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=RESULT, help="the JSON file to write"
    )
    output = parser.parse_args().output
    try:
        libtpu = version("libtpu")
    except ImportError:
        raise SystemExit("there is no libtpu; pip install 'jax[tpu]'") from None
    jax.config.update("jax_platforms", "cpu")
    results: dict[str, list[dict[str, Any]]] = {}
    for name, measured, cases in (
        ("attention", measure, CASES),
        ("llama-3.1-8b", measure_llama, LLAMA_CASES),
    ):
        for case in cases:
            results.setdefault(name, []).append(measured(*case))
            print(name, json.dumps(results[name][-1]), file=sys.stderr)
    versions = {"jax": version("jax"), "libtpu": libtpu}
    command = shlex.join(["python", "-m", "benchmarks.tpu", *sys.argv[1:]])
    result = {"command": command, "machine": describe_machine() | versions, **results}
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
