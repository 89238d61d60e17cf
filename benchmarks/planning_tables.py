"""Tables that the planner computes, in the pages that have them: ``python -m benchmarks.planning_tables``."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from ringspan.core.expert_slices import num_slices
from ringspan.core.messages.units import shown_bandwidth, shown_bytes, shown_speed
from ringspan.core.names import CATEGORIES
from ringspan.plan.cluster.hardware import (
    DEVICES,
    Device,
    min_block_tokens,
    min_tokens_per_device,
)
from ringspan.plan.cost.kept import saved_per_token
from ringspan.plan.cost.memory import Memory, training_memory
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.shards import host_bytes
from ringspan.plan.model.configs import MODELS
from ringspan.plan.planner import make_plan
from ringspan.plan.search import Question, longest_setting

DOCS: Final = Path(__file__).parents[1] / "docs"
PAGES: Final = ("planning.md", "published.md", "adapters.md", "memory.md", "which.md")
K: Final = 1024

# Hardware, devices, model, and the longest context in thousands of tokens as published: with blockwise attention and
# feed-forward, and with Ring Attention (Liu, Zaharia, Abbeel 2023, arXiv 2310.01889v4, table 3). A TPU v4 chip is one
# device, so "TPUv4-1024" (cores) are 512, as the 512x of that table says; of v3 each core is one. The text beside the
# table (section 5.1) says "over 1 million tokens" of the 7B model on 32 A100, a quarter of the table's 4096.
PUBLISHED_CONTEXT: Final = (
    ("8x A100 NVLink", "a100-80gb", 8, "llama-3b", 64, 512),
    ("8x A100 NVLink", "a100-80gb", 8, "llama-7b", 32, 256),
    ("8x A100 NVLink", "a100-80gb", 8, "llama-13b", 16, 128),
    ("32x A100 InfiniBand", "a100-80gb", 32, "llama-7b", 128, 4096),
    ("32x A100 InfiniBand", "a100-80gb", 32, "llama-13b", 64, 2048),
    ("TPUv3-512", "tpu-v3", 512, "llama-7b", 8, 2048),
    ("TPUv3-512", "tpu-v3", 512, "llama-13b", 8, 1024),
    ("TPUv4-1024", "tpu-v4", 512, "llama-3b", 32, 16_384),
    ("TPUv4-1024", "tpu-v4", 512, "llama-7b", 16, 8192),
    ("TPUv4-1024", "tpu-v4", 512, "llama-13b", 16, 4096),
    ("TPUv4-1024", "tpu-v4", 512, "llama-30b", 8, 2048),
    ("TPUv5e-256", "tpu-v5e", 256, "llama-3b", 32, 4096),
    ("TPUv5e-256", "tpu-v5e", 256, "llama-7b", 16, 2048),
)


# Hidden size, an expert's intermediate size, and the experts of a token, by the models' configs.
MIXTURES: Final = {
    "qwen3-30b-a3b": (2048, 768, 8),
    "qwen3-235b-a22b": (4096, 1536, 8),
    "gpt-oss-120b": (2880, 2880, 4),
    "glm-5": (6144, 2048, 8),
    "deepseek-v3": (7168, 2048, 8),
}


def devices() -> str:
    """The devices that have names, in the vendors' numbers."""
    rows = [
        (
            f"`{name}`",
            each.title,
            shown_speed(each.flops),
            shown_bandwidth(each.memory_bandwidth),
            f"{shown_bandwidth(each.intra_node_bandwidth)}, {each.devices_per_node:,}",
            shown_bandwidth(each.inter_node_bandwidth),
        )
        for name, each in DEVICES.items()
    ]
    return _table(
        (
            "name",
            "device",
            "bfloat16",
            "memory bandwidth",
            "link in a node, its devices",
            "between nodes",
        ),
        rows,
    )


def minimal_blocks() -> str:
    """Minimal block and tokens per device for each link of the published table."""
    links = (
        # The last two columns: table 2 of arXiv 2310.01889v4.
        ("A100 NVLink", "a100-80gb", True, "1.0", "6.2"),
        ("A100 InfiniBand", "a100-80gb", False, "24.5", "149.5"),
        ("TPU v3", "tpu-v3", True, "1.1", "6.6"),
        ("TPU v4", "tpu-v4", True, "1.0", "6.2"),
        ("TPU v5e", "tpu-v5e", True, "1.1", "6.3"),
        ("H100 NVLink", "h100-80gb", True, "", ""),
        ("H100 InfiniBand", "h100-80gb", False, "", ""),
        ("B200 NVLink", "b200", True, "", ""),
        ("TPU v5p", "tpu-v5p", True, "", ""),
    )
    rows = []
    for title, name, inside, block, tokens in links:
        device = DEVICES[name]
        bandwidth = (
            device.intra_node_bandwidth if inside else device.inter_node_bandwidth
        )
        ours = min_block_tokens(device.flops, bandwidth)
        numbers = (
            f"{device.flops / 1e12:,.0f}",
            f"{bandwidth / 1e9:g}",
            f"{ours / 1e3:.1f}",
        )
        rows.append(
            (title, *numbers, f"{min_tokens_per_device(ours) / 1e3:.1f}", block, tokens)
        )
    return _table(
        (
            "link",
            "TFLOP/s",
            "GB/s",
            "block (1e3)",
            "tokens (1e3)",
            "published",
            "published ",
        ),
        rows,
    )


def layer_bytes(kind: str, batch: int, length: int, hidden: int, block: int = 0) -> int:
    """Published activation bytes of a layer in bfloat16: 2bhs^2, 8bsh, 2bsh and 6bch (h heads in the first).

    Source: arXiv 2310.01889v4, table 1, "total"; those of blockwise layers first in arXiv 2305.19370.
    """
    match kind:
        case "vanilla":
            return 2 * batch * hidden * length**2
        case "memory-efficient attention":
            return 8 * batch * length * hidden
        case "blockwise":
            return 2 * batch * length * hidden
        case "ring":
            return 6 * batch * block * hidden
    raise ValueError(kind)


def activations() -> str:
    """Published formulas, at 1M tokens in blocks of 4K and at 100M tokens with hidden size 1024."""
    heads = 32
    rows = []
    for kind, formula in (
        ("vanilla", "2bhs^2"),
        ("memory-efficient attention", "8bsh"),
        ("blockwise", "2bsh"),
        ("ring", "6bch"),
    ):
        hidden = heads if kind == "vanilla" else 4096
        million = layer_bytes(kind, 1, 1 << 20, hidden, 4096)
        hundred = layer_bytes(kind, 1, 10**8, 16 if kind == "vanilla" else 1024, 4096)
        rows.append((kind, formula, shown_bytes(million), shown_bytes(hundred)))
    return _table(
        ("attention", "bytes per layer", "1M tokens, h 4096", "100M tokens, h 1024"),
        rows,
    )


def flops_ratios() -> str:
    """How much dearer a dataset becomes from 4K to longer contexts; published: figure 5 of arXiv 2310.01889v4."""
    lengths = (32 * K, 128 * K, 1024 * K, 10_240 * K)
    published = {
        "llama-7b": 37.4,
        "llama-13b": 31.0,
        "llama-30b": 23.2,
        "llama-65b": 20.6,
        "gpt-175b": 14.4,
    }
    rows = [
        (
            name,
            *(
                f"{dataset_flops_ratio(MODELS[name].hidden, length, 4 * K):.1f}"
                for length in lengths
            ),
            f"{at_a_million:.1f}",
        )
        for name, at_a_million in published.items()
    ]
    return _table(("model", "32K", "128K", "1M", "10M", "1M, published"), rows)


def dataset_flops_ratio(hidden: int, length: int, base_length: int) -> float:
    """Return how much dearer a dataset becomes at a longer context: ``(6 C + S2) / (6 C + S1)``.

    From 24 C^2 + 4 S C FLOPs per token and layer (Liu, Zaharia, Abbeel 2023, appendix D), causal or not.
    """
    return (6 * hidden + length) / (6 * hidden + base_length)


def longest_contexts(
    kind: str, devices: int, model: str
) -> tuple[Setting, Setting | None]:
    """How the longest sequence is held, in bfloat16 over float32 state: on the devices, and with their hosts' help
    where these are known.
    """
    device = DEVICES[kind]
    alone = Question(
        shape=MODELS[model],
        device=replace(device, host_bandwidth=0.0),
        devices=devices,
        length=1,
    )
    on_devices = longest_setting(alone)
    assert on_devices is not None, "every published model fits its devices"
    return on_devices, longest_setting(
        replace(alone, device=device)
    ) if device.host_bandwidth else None


def _context_row(
    title: str, kind: str, devices: int, model: str, blockwise: int, ring: int
) -> tuple[str, ...]:
    shape, device = MODELS[model], DEVICES[kind]
    as_published = Setting(
        length=ring * K,
        ring=devices,
        checkpoint="full",
        compute_dtype="float32",
        on_gpu=False,
    )
    need = training_memory(shape, as_published).peak_bytes
    on_devices, with_host = longest_contexts(kind, devices, model)
    memory = training_memory(shape, on_devices)
    again = (
        on_devices.number_bytes * shape.hidden * (on_devices.layers_per_checkpoint - 1)
    )
    kept = (
        on_devices.tokens
        * (saved_per_token(shape, on_devices, shape.layers) + again)
        / memory.peak_bytes
    )
    return (
        title,
        model,
        f"{blockwise:,}K",
        f"{ring:,}K",
        f"{need / 1e9:.1f} of {device.memory_bytes / 1e9:.0f} GB",
        f"{on_devices.length // K:,}K",
        f"{on_devices.length / (ring * K):.1f}x",
        f"{memory.moment}, {kept:.0%} inputs",
        f"{with_host.length // K:,}K" if with_host else "",
        f"{with_host.length / (ring * K):.1f}x" if with_host else "",
    )


def contexts() -> str:
    """The longest context of each published row, and what we reach on the same devices."""
    rows = [_context_row(*row) for row in PUBLISHED_CONTEXT]
    ours = ("ours", "ours / ring", "bound by", "with hosts", "with hosts / ring")
    return _table(
        ("hardware", "model", "blockwise", "ring", "published, our bytes", *ours), rows
    )


def utilizations() -> str:
    """Expected MFU against context: short sequences on replicas, long ones on a ring of all devices."""
    rows = []
    for model, kind, devices, published in (
        ("llama-7b", "a100-80gb", 8, 256),
        ("llama-13b", "a100-80gb", 32, 2048),
        ("llama-30b", "tpu-v4", 512, 2048),
    ):
        cells = [
            _mfu(model, DEVICES[kind], devices, length * K)
            for length in (4, 32, published, 2 * published)
        ]
        rows.append(
            (model, f"{devices} x {DEVICES[kind].title}", f"{published:,}K", *cells)
        )
    return _table(
        (
            "model",
            "devices",
            "published",
            "4K",
            "32K",
            "published length",
            "twice that",
        ),
        rows,
    )


def _mfu(model: str, device: Device, devices: int, length: int) -> str:
    """Of the plan for 4M tokens per step, or for one sequence if it is longer; with the ring that the plan chose."""
    batch = max(devices, (4096 * K) // length) if length <= 32 * K else 1
    plan = make_plan(
        Question(
            shape=MODELS[model],
            device=device,
            devices=devices,
            length=length,
            batch=batch,
        )
    )
    split = f", tp {plan.setting.tp}" if plan.setting.tp > 1 else ""
    return (
        f"{plan.cost.mfu:.0%} (ring {plan.setting.ring}{split})"
        if plan.fits
        else "does not fit"
    )


def fine_tuning() -> str:
    """Llama 3.1 8B in bfloat16 throughout, from one device to four, with each option."""
    shape = MODELS["llama-3.1-8b"]
    plain = Setting(length=K, checkpoint="none", parameter_dtype="bfloat16")
    four = replace(plain, ring=4)
    rows: list[tuple[str, Memory]] = [
        ("1K, one device", training_memory(shape, plain)),
        (
            "1K a device, four devices",
            training_memory(shape, replace(four, length=4 * K)),
        ),
        (
            "8K a device, four devices",
            training_memory(shape, replace(four, length=32 * K)),
        ),
        ("8K on a ring of four", training_memory(shape, replace(four, length=8 * K))),
        ("8K on a ring of four, attention kept", _with(four, 8 * K, "attention")),
        ("118K on a ring of four, attention kept", _with(four, 118 * K, "attention")),
        ("512K on a ring of four, attention kept", _with(four, 512 * K, "attention")),
        ("512K on a ring of four, inputs kept", _with(four, 512 * K, "full")),
        (
            "512K on a ring of four, attention kept, one input of 4",
            _with(replace(four, layers_per_checkpoint=4), 512 * K, "attention"),
        ),
    ]
    table = [
        (
            name,
            *(f"{memory.bytes[c] / 1e9:.1f}" for c in memory.bytes),
            f"{memory.peak_bytes / 1e9:.1f}",
            memory.moment,
        )
        for name, memory in rows
    ]
    return _table(("GB per device", *CATEGORIES, "peak", "highest moment"), table)


def _with(setting: Setting, length: int, checkpoint: str) -> Memory:
    return training_memory(
        MODELS["llama-3.1-8b"], replace(setting, length=length, checkpoint=checkpoint)
    )


def longest_fine_tuning() -> str:
    """The longest sequence of Llama 3.1 8B per number of devices: on these alone, and with their hosts' help."""
    rows = []
    for devices in (1, 4, 8, 32, 128):
        cells = []
        for kind, with_hosts in (
            ("h100-80gb", False),
            ("h100-80gb", True),
            ("h200", False),
            ("h200", True),
        ):
            for dtype in ("bfloat16", "float32"):
                device = (
                    DEVICES[kind]
                    if with_hosts
                    else replace(DEVICES[kind], host_bandwidth=0.0)
                )
                options = {"devices": devices, "length": 1, "parameter_dtype": dtype}
                setting = longest_setting(
                    Question(shape=MODELS["llama-3.1-8b"], device=device, **options)
                )
                cells.append(f"{setting.length // K:,}K" if setting else "no")
        rows.append((str(devices), *cells))
    kinds = ("H100", "H100 and hosts", "H200", "H200 and hosts")
    return _table(
        (
            "devices",
            *(f"{kind}, {state} state" for kind in kinds for state in ("bf16", "fp32")),
        ),
        rows,
    )


def longest_experts() -> str:
    """The longest sequence of large mixtures, experts gathered whole or in slices; bfloat16 state, moments on hosts."""
    rows = []
    for rank in (0, 16):
        for model in ("qwen3-235b-a22b", "gpt-oss-120b", "glm-5", "deepseek-v3"):
            for kind in ("h100-80gb", "h200"):
                cells = []
                for devices in (8, 16, 64):
                    shape = MODELS[model].adapted(rank) if rank else MODELS[model]
                    question = Question(
                        shape=shape,
                        device=DEVICES[kind],
                        devices=devices,
                        length=1,
                        route="ring",
                        parameter_dtype="bfloat16",
                    )
                    cells += [
                        _shown_length(longest_setting(question)),
                        _shown_length(
                            longest_setting(replace(question, expert_slices="auto"))
                        ),
                    ]
                trained = f"adapters of rank {rank}" if rank else "all weights"
                size = f"{DEVICES[kind].memory_bytes / 1e9:.0f} GB"
                rows.append((f"{model}, {trained}", size, *cells))
    columns = (
        f"{devices}, {how}" for devices in (8, 16, 64) for how in ("whole", "slices")
    )
    return _table(("model", "device", *columns), rows)


def break_even() -> str:
    """Tokens per GPU from which gathering experts moves fewer bytes than dispatching tokens, and what is gathered."""
    rows = []
    for model, (hidden, intermediate, chosen) in MIXTURES.items():
        experts, numbers = max(kind.experts for kind in MODELS[model].kinds)
        assert numbers >= 3 * experts * hidden * intermediate, model
        layer = 2 * numbers
        slices = num_slices("auto", experts, layer)
        rows.append(
            (
                model,
                f"{experts} x {intermediate:,}, {chosen}",
                f"{9 * experts * intermediate / (4 * chosen):,.0f}",
                f"{2 * experts * intermediate / chosen:,.0f}",
                f"{layer / 1e9:.1f} GB",
                f"{3 * layer / 1e9:.1f} GB",
                f"{3 * layer / slices / 1e9:.1f} GB, {slices} slices"
                if slices > 1
                else "the same",
            )
        )
    return _table(
        (
            "model",
            "experts x I, k",
            "9 E I / (4 k)",
            "2 E I / k",
            "W",
            "3 W in memory",
            "with `auto`",
        ),
        rows,
    )


def _shown_length(setting: Setting | None) -> str:
    return f"{setting.length // K:,}K" if setting else "no"


def longest_qlora() -> str:
    """The longest sequence with adapters of rank 16 over nf4 with packed scales: no hosts, moments in float32."""
    rows = []
    for model in ("llama-3.1-8b", "qwen3-32b", "llama-3.3-70b", "gpt-oss-120b"):
        for kind in ("rtx-4090", "l40s", "h100-80gb"):
            device = replace(DEVICES[kind], host_bandwidth=0.0)
            asked = Question(
                shape=MODELS[model].adapted(16, "nf4-double"),
                device=device,
                devices=1,
                length=1,
                parameter_dtype="bfloat16",
            )
            found = [
                longest_setting(replace(asked, devices=devices))
                for devices in (1, 2, 4, 8)
            ]
            cells = [
                f"{setting.length // K:,}K" if setting else "no" for setting in found
            ]
            rows.append((model, f"{device.memory_bytes / 1e9:.0f} GB", *cells))
    return _table(("model", "device", "1", "2", "4", "8"), rows)


def folded() -> str:
    """The longest sequence of Llama 3.1 8B with 2 TB of host in one pass and in folds, and the seconds of that step."""
    rows = []
    for kind, devices in (("h100-80gb", 1), ("h200", 1), ("h100-80gb", 8), ("h200", 8)):
        device = replace(DEVICES[kind], host_memory_bytes=2 * 10**12 // devices)
        question = Question(
            shape=MODELS["llama-3.1-8b"], device=device, devices=devices, length=1
        )
        if devices == 1:  # the state of 8B parameters in float32 fits no 80 GB
            question = replace(question, parameter_dtype="bfloat16")
        in_folds = replace(question, folds=0)
        one, many = longest_setting(question), longest_setting(in_folds)
        assert one is not None and many is not None, "both fit"
        cost = in_folds.step_cost(many)
        rows.append(
            (
                f"{devices} x {device.title}",
                f"{one.length / 1e6:.2f}M, {question.limit(one)}",
                f"{many.length / 1e6:.2f}M, {in_folds.limit(many)}",
                str(many.folds),
                f"{training_memory(question.shape, many).needed_bytes / 1e9:.0f} GB",
                f"{host_bytes(question.shape, many) / 1e9:,.0f} GB",
                f"{cost.attention_seconds / 3600:.2f}",
                *(
                    f"{each / 60:.1f}"
                    for each in (cost.host_seconds, cost.gather_seconds)
                ),
                f"{cost.seconds / 3600:.2f}",
            )
        )
    head = (
        "devices",
        "one pass, limit",
        "in folds, limit",
        "folds",
        "a device holds",
        "its host",
    )
    return _table(
        (
            *head,
            "attention (hours)",
            "host copies (minutes)",
            "weights (minutes)",
            "step (hours)",
        ),
        rows,
    )


TABLES: Final[dict[str, Callable[[], str]]] = {
    "devices": devices,
    "minimal-blocks": minimal_blocks,
    "activations": activations,
    "flops-ratios": flops_ratios,
    "contexts": contexts,
    "utilizations": utilizations,
    "fine-tuning": fine_tuning,
    "longest": longest_fine_tuning,
    "qlora": longest_qlora,
    "folded": folded,
    "experts": longest_experts,
    "break-even": break_even,
}


def fill(text: str) -> str:
    """A page with each table between ``<!-- table NAME -->`` and ``<!-- end -->`` computed anew."""

    def filled(match: re.Match[str]) -> str:
        if match[1] not in TABLES:  # of another module
            return match[0]
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(
        r"<!-- table ([a-z-]+) -->.*?<!-- end -->", filled, text, flags=re.DOTALL
    )


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    for name in PAGES:
        page = DOCS / name
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
