"""The local kernels beside the best that there is, on one sequence: seconds and FLOP/s, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.schedule.schedule import make_schedule
from ringspan.measure.bench.ring import alone, timed
from ringspan.torch.engine import kernels
from ringspan.torch.engine.kernels.contract import Scores

_KINDS: Final = ("forward", "backward")
_BACKENDS: Final = {
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
}
Passes = dict[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention of 32 query heads and 8 key/value heads in bfloat16."""

    mask: str
    tokens: int
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    has_flex: bool = False

    @property
    def name(self) -> str:
        return f"kernels-{self.mask.split(':')[0]}-{self.tokens // 1024}k-{self.head_dim}{'-flex' * self.has_flex}"

    def shrunk(self) -> "Case":
        """For a dry run of the script."""
        mask = (
            "documents:9,40,15"
            if self.mask.startswith("documents")
            else self.mask.replace("4096", "20")
        )
        return Case(mask=mask, tokens=64, head_dim=16, heads=2, kv_heads=1)


def compare(case: Case) -> Callable[[bool], dict[str, Any]]:
    """Ours and PyTorch's own."""
    return lambda quick: _measure(case.shrunk() if quick else case)


def _measure(case: Case) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mask = Mask.parse(case.mask)
    schedule = make_schedule(Layout("contiguous", case.tokens, 1), mask, 0)
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        shape = 1, case.tokens, heads, case.head_dim
        return (
            torch.randn(shape, generator=generator, device=device)
            .to(dtype)
            .transpose(1, 2)
        )

    q, dout, k, v = (
        random(case.heads),
        random(case.heads),
        random(case.kv_heads),
        random(case.kv_heads),
    )
    scores = Scores(case.head_dim**-0.5)
    names = tuple(
        name for name in kernels.serving("auto", q, v, scores) if name != "eager"
    )
    contenders: dict[str, Passes] = {}
    with torch.no_grad():
        for name in names:
            contenders[name] = alone(name, schedule, scores, dout, q, k, v)
    if case.mask in ("causal", "full"):
        for name, backend in _BACKENDS.items() if device.type == "cuda" else ():
            contenders[name] = _sdpa(backend, case.mask == "causal", dout, q, k, v)
    if case.has_flex:
        contenders["flex"] = _flex(case.mask, dout, q, k, v)
    seconds = {name: _time(passes, device) for name, passes in contenders.items()}
    flops = 4.0 * schedule.num_pairs * case.heads * case.head_dim
    chosen = kernels.choose(names, schedule.hops[0].bands, q).name
    measured = {name: each for name, each in seconds.items() if "error" not in each}
    fastest = {
        kind: min(measured, key=lambda name: measured[name][kind]) for kind in _KINDS
    }
    return {
        "seconds": seconds,
        "flops_per_second": {
            name: {
                "forward": flops / each["forward"],
                "backward": 2.5 * flops / each["backward"],
            }
            for name, each in measured.items()
        },
        "chosen": chosen,
        "fastest": fastest,
        "fraction_of_fastest": {
            kind: measured[fastest[kind]][kind] / measured[chosen][kind]
            for kind in _KINDS
        },
    }


def _time(passes: Passes, device: torch.device) -> dict[str, Any]:
    try:
        found: dict[str, Any] = {}
        for kind in _KINDS:
            timed(passes[kind], device)  # tunes, compiles
            found[kind] = median(timed(passes[kind], device) for _ in range(3))
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _sdpa(
    backend: SDPBackend, is_causal: bool, dout: Tensor, *inputs: Tensor
) -> Passes:
    def forward() -> Tensor:
        with sdpa_kernel(backend):
            q, k, v = leaves
            return scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=True
            )

    return _by_autograd(forward, dout, leaves := _leaves(*inputs))


def _flex(mask: str, dout: Tensor, *inputs: Tensor) -> Passes:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves = _leaves(*inputs)
    tokens, device = inputs[0].shape[2], inputs[0].device
    compiled = torch.compile(flex_attention)
    document = torch.zeros(tokens, dtype=torch.int32, device=device)
    window = tokens
    if mask.startswith("documents:"):
        ends = torch.tensor(
            [int(length) for length in mask.split(":")[1].split(",")], device=device
        ).cumsum(0)
        document = torch.bucketize(
            torch.arange(tokens, device=device), ends, right=True
        )
    elif mask.startswith("window:"):
        window = int(mask.split(":")[1])

    def allowed(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (row >= key) & (row - key < window) & (document[row] == document[key])

    block_mask = create_block_mask(
        allowed, None, None, tokens, tokens, device=str(device), _compile=True
    )
    return _by_autograd(
        lambda: compiled(*leaves, block_mask=block_mask, enable_gqa=True), dout, leaves
    )


def _leaves(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in inputs]


def _by_autograd(
    forward: Callable[[], Any], dout: Tensor, leaves: list[Tensor]
) -> Passes:
    kept: list[Tensor] = []

    def first() -> None:
        kept[:] = [forward()]

    return {
        "forward": first,
        "backward": lambda: torch.autograd.grad(
            kept[0], leaves, dout, retain_graph=True
        ),
    }
