"""Layers with a state on a ring: errors against the number of ranks, bytes against the length, and a step of a small
hybrid against one process.

    python -m benchmarks.recurrence [error] [bytes] [step] [second-pass]

Errors: outputs and gradients of 65,536 tokens in float32 against the same code in float64 over the whole sequence, cut
into the spans that a zigzag ring of so many ranks has. One process computes all spans, which changes no number, so that
no machine of 16 devices is needed. Decays are from near 0 to near 1; one of the two heads remembers its first tokens to
the end.

Bytes: what two ranks send for a layer and a convolution of four taps, forward and backward.
"""

import argparse
import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

import ringspan as rs
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.recurrence.spans import places_of
from ringspan.measure.machine import describe_machine, timed
from ringspan.torch.engine.recurrence.current import SequencePass
from ringspan.torch.engine.recurrence.recurrence import convolution, recurrence
from ringspan.torch.engine.transport.exchange import COUNTERS
from ringspan.torch.model.memory.checkpointing import checkpoint_layers
from ringspan.torch.model.view import view_of
from ringspan.torch.runtime.launch import launch
from tests.torch.engine.recurrence.layers import LAYERS, inputs
from tests.torch.engine.recurrence.models import module_of

RESULTS: Final = Path(__file__).parent / "results"
RANKS: Final = (1, 2, 4, 8, 16)
TOKENS: Final = 65_536
LENGTHS: Final = (4096, 16_384, 65_536)
KINDS: Final = ("gated delta rule", "mamba-2", "lightning attention")


def spans_of(ranks: int, tokens: int = TOKENS) -> CustomLayout:
    """All spans of a zigzag ring, on one rank; of a ring of one, the whole sequence."""
    starts = [place.start for place in places_of(rs.Layout("zigzag", tokens, ranks))]
    return CustomLayout.of(
        [[(a, b - a) for a, b in pairwise((*starts, tokens))]]
        if ranks > 1
        else [[(0, tokens)]]
    )


def remember(arguments: dict[str, Any]) -> None:
    """Let the first head lose next to nothing in 65,536 tokens."""
    for name, factor in (("g", 1e-6), ("beta", 1e-4)):
        if name in arguments:
            arguments[name][..., 0] *= factor
    for name, value in (("A", -1e-5), ("slopes", 1e-5)):
        if name in arguments:
            arguments[name][0] = value


def errors(kind: str) -> dict[str, Any]:
    """Of outputs and of the worst gradient, by number of ranks."""
    layer = LAYERS[kind]
    arguments = inputs(kind, 1, TOKENS, size=16)
    remember(arguments)
    arguments |= {
        name: 64 for name in ("chunk_size", "block_tokens") if name in arguments
    }

    def results(dtype: torch.dtype, ranks: int) -> list[Tensor]:
        leaves = {
            name: x.to(dtype).requires_grad_() if isinstance(x, Tensor) else x
            for name, x in arguments.items()
        }
        out = recurrence(
            layer.rule, layer.of(dtype), leaves, SequencePass((spans_of(ranks),), None)
        )
        weights = torch.randn(
            out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        tensors = [x for x in leaves.values() if isinstance(x, Tensor)]
        return [
            out.detach(),
            *torch.autograd.grad((out * weights.to(dtype)).sum(), tensors),
        ]

    truth = results(torch.float64, 1)
    rows = []
    for ranks in RANKS:
        found = [
            float((x.double() - y).norm() / y.norm())
            for x, y in zip(results(torch.float32, ranks), truth, strict=True)
        ]
        rows.append({"ranks": ranks, "out": found[0], "worst_gradient": max(found[1:])})
        print(kind, rows[-1], flush=True)
    return {"layer": kind, "tokens": TOKENS, "rows": rows}


def measure_bytes(length: int) -> dict[str, int]:
    """What this rank of two sends for one layer, by its kind, and for a convolution over 32 channels."""
    ring = rs.init_mesh(ring=2)["ring"]
    sequences = SequencePass((rs.Layout("zigzag", length, 2),), ring.get_group())
    sent: dict[str, int] = {}
    for kind in KINDS:
        arguments = inputs(kind, 1, length // 2, size=16)
        leaves = {
            key: x.float().requires_grad_() if isinstance(x, Tensor) else x
            for key, x in arguments.items()
        }
        before = COUNTERS.sent_bytes
        recurrence(
            LAYERS[kind].rule, LAYERS[kind].of(torch.float32), leaves, sequences
        ).sum().backward()
        sent[kind] = COUNTERS.sent_bytes - before
    x, weight = torch.randn(1, 32, length // 2, requires_grad=True), torch.randn(32, 4)
    before = COUNTERS.sent_bytes
    convolution(
        module_of("lfm2", torch.float32)["causal_conv1d_fn"], x, weight, None, sequences
    ).sum().backward()
    return sent | {"convolution": COUNTERS.sent_bytes - before}


def small_hybrid(length: int) -> Any:
    """Three layers of the gated delta rule and one of attention, as in Qwen3.5."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        max_position_embeddings=length,
        use_cache=False,
    )
    return (
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        .float()
        .train()
    )


def step_of(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_step(length: int, layout: Any, repeats: int) -> dict[str, Any]:
    """On each of two ranks of one thread; the first also runs one process of two threads, in turns."""
    mesh = rs.init_mesh(ring=2)
    tokens = torch.randint(
        0, 4096, (1, length), generator=torch.Generator().manual_seed(0)
    )
    batch = {"input_ids": tokens, "labels": tokens}
    model = rs.parallelize(small_hybrid(length), mesh, layout=layout, checkpoint="full")
    part = rs.shard_batch(batch, mesh, layout=layout)
    ours = partial(step_of, model, torch.optim.AdamW(model.parameters(), lr=1e-4), part)
    theirs = None
    if dist.get_rank() == 0:
        plain = small_hybrid(length)
        checkpoint_layers(view_of(plain), "full")
        theirs = partial(
            step_of, plain, torch.optim.AdamW(plain.parameters(), lr=1e-4), batch
        )
    pairs = [
        (timed(ours, threads=1), timed(theirs, threads=2)) for _ in range(repeats + 1)
    ][1:]
    return {
        "layout": layout,
        "length": length,
        "ratio_seconds": median(a / b for a, b in pairs),
        "ring_seconds": median(a for a, _ in pairs),
        "one_process_seconds": median(b for _, b in pairs),
    }


def second_pass(kind: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of one layer on the four spans of a zigzag ring of two, each computed twice but for the first, over those
    of the whole sequence; in one process, where nothing is sent.
    """
    layer, size = LAYERS[kind], 64
    arguments = inputs(kind, 1, tokens, heads=4, size=size)
    arguments |= {
        name: 64 for name in ("chunk_size", "block_tokens") if name in arguments
    }
    leaves = {
        key: x.float().requires_grad_() if isinstance(x, Tensor) else x
        for key, x in arguments.items()
    }
    tensors = [x for x in leaves.values() if isinstance(x, Tensor)]

    def run(ranks: int, *, backward: bool) -> None:
        out = recurrence(
            layer.rule,
            layer.of(torch.float32),
            leaves,
            SequencePass((spans_of(ranks, tokens),), None),
        )
        if backward:
            torch.autograd.grad(out.sum(), tensors)

    found = {}
    for name, backward in (("ratio_forward", False), ("ratio_forward_backward", True)):
        pairs = [
            [
                timed(partial(run, ranks, backward=backward), threads=1)
                for ranks in (2, 1)
            ]
            for _ in range(repeats + 1)
        ]
        found[name] = median(a / b for a, b in pairs[1:])
    return {"layer": kind, "tokens": tokens, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", nargs="*", default=["error", "bytes", "step", "second-pass"]
    )
    parser.add_argument("--length", type=int, default=4096)
    chosen = parser.parse_args()
    machine = describe_machine()
    if "error" in chosen.what:
        torch.set_num_threads(1)
        facts = {
            "command": "python -m benchmarks.recurrence error",
            "machine": machine,
            "layers": [*map(errors, KINDS)],
        }
        (RESULTS / "recurrence-error-cpu.json").write_text(
            json.dumps(facts, indent=1) + "\n"
        )
    if "bytes" in chosen.what:
        rows = [
            {
                "length": length,
                "sent_bytes": launch(measure_bytes, 2, length, threads=1),
            }
            for length in LENGTHS
        ]
        facts = {
            "command": "python -m benchmarks.recurrence bytes",
            "machine": machine,
            "rows": rows,
        }
        (RESULTS / "recurrence-bytes-cpu.json").write_text(
            json.dumps(facts, indent=1) + "\n"
        )
        print(json.dumps(rows))
    if "step" in chosen.what:
        rows = [
            launch(measure_step, 2, chosen.length, layout, 3, threads=1)[0]
            for layout in ("zigzag", "contiguous")
        ]
        facts = {
            "command": "python -m benchmarks.recurrence step",
            "machine": machine,
            "rows": rows,
        }
        (RESULTS / "recurrence-step-cpu.json").write_text(
            json.dumps(facts, indent=1) + "\n"
        )
        print(json.dumps(rows))
    if "second-pass" in chosen.what:
        rows = [
            launch(second_pass, 1, kind, chosen.length, 5, threads=1)[0]
            for kind in KINDS
        ]
        facts = {
            "command": "python -m benchmarks.recurrence second-pass",
            "machine": machine,
            "rows": rows,
        }
        (RESULTS / "recurrence-second-pass-cpu.json").write_text(
            json.dumps(facts, indent=1) + "\n"
        )
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
