"""Host waits and compilations of a step, and the cost of deterministic mode."""

import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ringspan as rs
from benchmarks.gpu.documents import batch_of, documents
from benchmarks.gpu.step import Row
from ringspan.measure.bench.ring import timed
from ringspan.measure.trace.dry_run import fake_mesh
from ringspan.plan.cost.setting import Setting
from ringspan.torch.parallelize import put_on_mesh

_RING: Final = 8
_SIZES: Final = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1 << 16,
}  # fmt: skip
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "qwen3_next": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "deepseek_v32": {
        "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "num_key_value_heads": 4, "index_n_heads": 4, "index_head_dim": 64, "index_topk": 256, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


@contextmanager
def _stepping(
    kind: str, num_layers: int, tokens: int, *, is_packed: bool, compile: bool = False
) -> Any:
    """A function that takes a step of a small model as rank 0 of a ring, on documents drawn by a number."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = Setting(
        length=_RING * tokens, ring=_RING, compile=compile, parameter_dtype="bfloat16"
    )
    with fake_mesh(setting, 0, device.type) as mesh:
        config = AutoConfig.for_model(
            kind, num_hidden_layers=num_layers, **_SIZES | _KINDS[kind]
        )
        with device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            ).train()
        model = put_on_mesh(model, mesh, setting)

        def take(draw: int, around: Callable[[], Any] | None = None) -> Any:
            batch = batch_of(
                config.vocab_size, setting.length, tokens // 2 * is_packed, draw
            )
            local = rs.shard_batch(batch, mesh, layout=setting.layout, device=device)
            if device.type == "cuda":
                torch.cuda.synchronize()
            with around() if around else warnings.catch_warnings() as found:
                model(**local).loss.backward()
            model.zero_grad()
            return found

        yield take


@contextmanager
def _waits() -> Any:
    """The places in Python at which the host waits for the device."""
    places: list[Any] = []
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    places += [
        f"{each.filename.rpartition('/site-packages/')[2][-80:]}:{each.lineno}"
        for each in noted
        if "synchronizing CUDA" in str(each.message)
    ]


def waits(
    kind: str, quick: bool, *, is_packed: bool = True, compile: bool = False
) -> dict[str, Any]:
    """Host waits for the device in a second step, by place, and per layer: from models of 2 and 6 layers."""
    found: dict[str, Any] = {}
    for num_layers in (2, 6):
        with _stepping(
            kind,
            num_layers,
            64 if quick else 1024,
            is_packed=is_packed,
            compile=compile,
        ) as take:
            take(0)
            found[f"of {num_layers} layers"] = dict(Counter(take(1, _waits)))
    few, many = (sum(each.values()) for each in found.values())
    return found | {"a layer": (many - few) / 4}


def recompiles(quick: bool) -> dict[str, Any]:
    """Graphs compiled up to each step over new documents, and seconds of that step and of its repetition."""
    counters = torch._dynamo.utils.counters["stats"]  # pyright: ignore
    found: dict[str, Any] = {}
    for name in ("eager", "compiled"):
        steps = found[name] = []
        is_compiled = name == "compiled" and not quick
        with _stepping(
            "llama", 2, 64 if quick else 1024, is_packed=True, compile=is_compiled
        ) as take:
            for draw in range(2 if quick else 8):
                seconds = []
                for _ in range(2):
                    started = time.perf_counter()
                    take(draw)
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - started)
                steps.append(
                    {
                        "graphs": counters["unique_graphs"],
                        "new": seconds[0],
                        "again": seconds[1],
                    }
                )
    return found


def determinism(quick: bool) -> dict[str, Any]:
    """Bitwise repeatability of passes, and their seconds, with and without PyTorch's deterministic mode."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length, heads = (64, 2) if quick else (8192, 32)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(
            1, n, length, 128, generator=generator, device=device, dtype=torch.bfloat16
        )
        for n in (heads, heads // 2, heads // 2, heads)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def both(mask: rs.Mask) -> list[torch.Tensor]:
        out = rs.ring_attention(*inputs, mask=mask)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    found: dict[str, Any] = {}
    masks = {
        "causal": "causal",
        "window": f"window:{length // 8}",
        "documents": documents(length, length // 8),
    }
    for name, text in masks.items():
        call = partial(both, rs.Mask.parse(text))
        for mode in (False, True):
            torch.use_deterministic_algorithms(mode)
            try:
                first, *others = (call() for _ in range(4))
                same = [
                    all(bool((a == b).all()) for a, b in zip(first, other, strict=True))
                    for other in others
                ]
                seconds = min(timed(call, device) for _ in range(5))
                found[f"{name}, {'deterministic' if mode else 'default'}"] = {
                    "same": all(same),
                    "seconds": seconds,
                }
            finally:
                torch.use_deterministic_algorithms(False)
    return found


ROWS: Final[dict[str, Row]] = {
    "determinism": determinism,
    "waits-llama": partial(waits, "llama", is_packed=False),
    "waits-packed": partial(waits, "llama"),
    "waits-experts": partial(waits, "qwen3_moe"),
    "waits-hybrid": partial(waits, "qwen3_next"),
    "waits-index": partial(waits, "deepseek_v32"),
    "waits-compiled": partial(waits, "llama", compile=True),
    "recompiles": recompiles,
}
