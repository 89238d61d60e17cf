"""What each memory option saves and costs: bytes by category of a traced step, and the time of real steps.

    python benchmarks/activations.py bytes    # fake tensors, any machine, about ten minutes
    python benchmarks/activations.py time     # two ranks of one thread; leave the machine alone for six minutes
    python benchmarks/activations.py norms    # one thread; leave the machine alone for a minute
    python benchmarks/activations.py chunks   # fake tensors, any machine, five minutes: feed-forwards by block

Results go to ``benchmarks/results/activations-cpu.json``, the picture of the longest to ``docs/activations.svg``.
"""

import copy
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from category_picture import category_picture
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from turns import timed_in_turns

import ringspan as rs
from ringspan.core.arguments import FREE_CHUNK_TOKENS
from ringspan.measure.bench.one_process import StepCase, small_llama
from ringspan.measure.machine import describe_machine, timed
from ringspan.measure.trace.dry_run import trace
from ringspan.plan.cost.setting import Setting
from ringspan.report.drawing import svg
from ringspan.torch.model.layers.blockwise.blocks import run_in_blocks
from ringspan.torch.runtime.launch import launch

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "activations-cpu.json"

_PLAIN: Final[dict[str, Any]] = {
    "checkpoint": "attention",
    "feedforward_chunk_tokens": 0,
    "norm_chunk_tokens": 0,
}
_BLOCKS: Final[dict[str, Any]] = {
    "checkpoint": "attention",
    "feedforward_chunk_tokens": 1024,
    "norm_chunk_tokens": 4096,
    "loss_chunk_vocabulary": 4096,
}
_NORMS: Final[dict[str, Any]] = {"norm_chunk_tokens": 4096}
# Each row adds to, or takes another policy than, the one before it.
BYTES: Final[dict[str, dict[str, Any]]] = {
    "nothing": {"checkpoint": "none", "loss_chunk_tokens": 1 << 30},
    "loss in blocks": {"checkpoint": "none"},
    "feed-forward in blocks": {"checkpoint": "none", "feedforward_chunk_tokens": 1024},
    "norms in blocks": {
        "checkpoint": "none",
        "feedforward_chunk_tokens": 1024,
        "norm_chunk_tokens": 4096,
    },
    "attention kept": _PLAIN,
    "attention kept, feed-forward in blocks": _PLAIN
    | {"feedforward_chunk_tokens": 1024},
    "attention kept, norms in blocks": _PLAIN
    | {"feedforward_chunk_tokens": 1024, "norm_chunk_tokens": 4096},
    "attention kept, all in blocks": _BLOCKS,
    "attention kept, one input of 4": _BLOCKS | {"layers_per_checkpoint": 4},
    "inputs kept, all in blocks": _BLOCKS | {"checkpoint": "full"},
    "one input of 4 kept, all in blocks": _BLOCKS
    | {"checkpoint": "full", "layers_per_checkpoint": 4},
}
TIMES: Final[dict[str, dict[str, Any]]] = {
    "attention kept": _PLAIN,
    "nothing": {"checkpoint": "none", "loss_chunk_tokens": 1 << 30},
    "loss in blocks": {"checkpoint": "none"},
    "feed-forward in blocks": _PLAIN | {"feedforward_chunk_tokens": 1024},
    "feed-forward in blocks of 4096": _PLAIN | {"feedforward_chunk_tokens": 4096},
    "norms in blocks": _PLAIN | {"norm_chunk_tokens": 4096},
    "vocabulary in blocks": _PLAIN | {"loss_chunk_vocabulary": 4096},
    "offload": _PLAIN | {"offload": "activations"},
    "one input of 2 layers": _PLAIN | {"layers_per_checkpoint": 2},
    "inputs kept": _PLAIN | {"checkpoint": "full"},
}


def count_bytes() -> dict[str, Any]:
    """The highest moment of a step of a Llama of 130M parameters, as rank 1 of 2, in bfloat16."""
    rows = [
        _traced(tokens, name, options)
        for tokens in (8192, 32_768, 131_072)
        for name, options in BYTES.items()
    ]
    longest = max(row["tokens_per_rank"] for row in rows)
    picture = category_picture(
        [row for row in rows if row["tokens_per_rank"] == longest]
    )
    (ROOT / "docs" / "activations.svg").write_text(svg(picture))
    return {"rows": rows}


def count_chunks() -> dict[str, Any]:
    """The same by the tokens of a feed-forward's block."""
    rows = [
        _traced(
            tokens,
            f"{kept}, {chunk}",
            {"checkpoint": kept, "feedforward_chunk_tokens": chunk, **_NORMS},
        )
        | {"chunk_tokens": chunk}
        for tokens in (8192, 32_768)
        for kept in ("attention", "full")
        for chunk in (1024, 2048, 4096, 8192)
    ]
    return {"rows": rows}


def _traced(tokens: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The highest moment of a step on ``tokens`` per rank."""
    setting = Setting(length=2 * tokens, ring=2, on_gpu=False, **options)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2 * tokens,
        use_cache=False,
    )
    peak = trace(config, setting, 1).peak
    print(tokens, name, f"{peak.total_bytes / 1e9:.2f} GB", file=sys.stderr, flush=True)
    row = {
        "ring": 2,
        "tokens_per_rank": tokens,
        "checkpoint": setting.checkpoint,
        "variant": name,
    }
    return row | {
        "phase": peak.phase,
        "peak_bytes": peak.total_bytes,
        "bytes": peak.bytes,
    }


def time_options(repeats: int = 5) -> dict[str, Any]:
    """Seconds of a step with each option over those of the first, and what keeping attention saves at 32K tokens."""
    wide = StepCase(
        length=8192, layers=2, hidden_size=512, heads=8, kv_heads=4, vocabulary=16_384
    )
    ratios = launch(_time_steps, 2, wide, TIMES, repeats, threads=1)[0]
    long = StepCase(
        length=32_768, layers=2, hidden_size=128, heads=2, kv_heads=2, vocabulary=1024
    )
    kept = launch(_time_kept, 2, long, repeats, threads=1)[0]
    return {
        "options": ratios,
        "options_config": repr(wide),
        "attention_kept": kept,
        "attention_kept_config": repr(long),
    }


def _steps(case: StepCase, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    mesh = rs.init_mesh()
    tokens = torch.randint(
        0, case.vocabulary, (1, case.length), generator=torch.Generator().manual_seed(0)
    )
    batch = rs.shard_batch({"input_ids": tokens, "labels": tokens}, mesh)

    def step(model: Any) -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    return {
        name: partial(step, rs.parallelize(small_llama(case), mesh, **chosen))
        for name, chosen in options.items()
    }


def _time_steps(
    case: StepCase, options: dict[str, dict[str, Any]], repeats: int
) -> dict[str, Any]:
    seconds = timed_in_turns(_steps(case, options), repeats, threads=1)
    first = next(iter(seconds.values()))
    return {
        name: {
            "seconds": median(took),
            "ratio_to_attention_kept": median(
                a / b for a, b in zip(took, first, strict=True)
            ),
        }
        for name, took in seconds.items()
    }


def _time_kept(case: StepCase, repeats: int) -> dict[str, float]:
    """What ``attention`` saves against ``full``, as a share of the ring's forward pass through all layers."""
    steps = _steps(
        case, {"full": {"checkpoint": "full"}, "attention": {"checkpoint": "attention"}}
    )
    tokens, size = case.length // dist.get_world_size(), case.hidden_size // case.heads
    q, k, v = (
        torch.randn(1, tokens, heads, size).transpose(1, 2)
        for heads in (case.heads, *[case.kv_heads] * 2)
    )

    def ring_forward() -> None:
        with torch.no_grad():
            for _ in range(case.layers):
                rs.ring_attention(q, k, v)

    seconds = timed_in_turns(steps | {"forward": ring_forward}, repeats, threads=1)
    shares = [
        (full - attention) / forward
        for full, attention, forward in zip(*seconds.values(), strict=True)
    ]
    return {
        "saved_share_of_ring_forward": median(shares),
        "least": min(shares),
        "most": max(shares),
    }


def time_norms(repeats: int = 7) -> dict[str, Any]:
    """What a checkpointed RMS norm costs in blocks over what it costs on all tokens, and the difference over the time
    of one C x C matrix product, forward twice and backward; a layer has some twelve of these and two norms.
    """
    return {"rows": launch(_time_norms, 1, repeats, threads=1)[0]}


def _time_norms(repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, size in ((8192, 512), (32_768, 512), (8192, 2048)):
            whole, product = (
                LlamaRMSNorm(size).to(dtype),
                torch.nn.Linear(size, size, bias=False, dtype=dtype),
            )
            blocks = copy.deepcopy(whole)
            run_in_blocks([blocks], FREE_CHUNK_TOKENS, "norm_chunk_tokens")
            hidden, d_out = (
                torch.randn(1, tokens, size, dtype=dtype) for _ in range(2)
            )
            hidden.requires_grad_()

            def step(
                module: Any, hidden: torch.Tensor = hidden, d_out: torch.Tensor = d_out
            ) -> None:
                with torch.no_grad():
                    module(hidden)
                module(hidden).backward(d_out)
                hidden.grad = None

            took = [
                [timed(partial(step, m), threads=1) for m in (whole, blocks, product)]
                for _ in range(repeats + 1)
            ]
            row = {"dtype": str(dtype), "tokens": tokens, "hidden_size": size}
            ratio = median(b / a for a, b, _ in took[1:])
            added = median((b - a) / c for a, b, c in took[1:])
            rows.append(row | {"ratio": ratio, "added_over_one_product": added})
    return rows


def main() -> None:
    """Run what is named, ``bytes`` and ``time`` when nothing is, and keep the results of the other."""
    results: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    )
    for name in sys.argv[1:] or ["bytes", "time"]:
        parts = {
            "bytes": count_bytes,
            "chunks": count_chunks,
            "time": time_options,
            "norms": time_norms,
        }
        result = parts[name]()
        command = f"python benchmarks/activations.py {name}"
        results[name] = {"command": command, **result, "machine": describe_machine()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
