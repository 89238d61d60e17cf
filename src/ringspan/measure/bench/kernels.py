"""Kernels that serve each kind of attention, chosen for a few cases; nothing is computed."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask, causal, chunked, documents, full, prefix_lm, sliding_window
from ringspan.core.schedule.schedule import make_schedule
from ringspan.torch import kernels
from ringspan.torch.attention.arguments import check_tensors
from ringspan.torch.kernels.contract import Scores

_RANKS: Final = 4
_LENGTH: Final = 16384
_HEADS: Final = 8
_NO_CUDA: Final = "it needs a CUDA device, and this machine has none"


@dataclass(frozen=True)
class Case:
    """A kind of attention on a zigzag ring of four: mask, scores, dtype, head sizes."""

    mask: Mask = causal()  # noqa: RUF009 - a Mask is frozen
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    value_dim: int = 128
    softcap: float = 0.0
    has_slopes: bool = False


CASES: Final[dict[str, Case]] = {
    "full": Case(full()),
    "causal": Case(),
    "window": Case(sliding_window(2800)),
    "prefix-LM": Case(prefix_lm(2000)),
    "documents": Case(documents([1200, 6000, 4000, 5184])),
    "documents in a window": Case(documents([1200, 6000, 4000, 5184], window=2800)),
    "chunks": Case(chunked(2400, length=_LENGTH)),
    "causal, float16": Case(dtype=torch.float16),
    "causal, float32": Case(dtype=torch.float32),
    "short documents, float32": Case(documents([512] * 32), dtype=torch.float32),
    "causal, float64": Case(dtype=torch.float64),
    "causal, soft cap (Gemma 2)": Case(softcap=50.0),
    "causal, ALiBi": Case(has_slopes=True),
    "causal, head sizes 192 and 128 (MLA)": Case(head_dim=192),
    "causal, head size 320": Case(head_dim=320, value_dim=320),
}


def serving(case: Case, where: torch.device) -> dict[str, float]:
    """Return the kernels that compute a case on a device with their shares of its pairs; empty if refused."""
    layout = Layout("zigzag", _LENGTH, _RANKS)
    hops = (hop for rank in range(_RANKS) for hop in make_schedule(layout, case.mask, rank).hops if hop.bands)
    pairs: Counter[str] = Counter()
    with FakeTensorMode():
        q, v = (torch.empty(1, _HEADS, 1, d, dtype=case.dtype, device=where) for d in (case.head_dim, case.value_dim))
        try:
            check_tensors(q, q, v)
        except UnsupportedError:
            return {}
        scores = Scores(case.head_dim**-0.5, case.softcap, torch.empty(1, device=where) if case.has_slopes else None)
        names = kernels.serving("auto", q, v, scores)
        for hop in hops:
            pairs[kernels.choose(names, hop.bands, q).name] += hop.num_pairs
    return {name: count / pairs.total() for name, count in pairs.most_common()}


def kernel_report(devices: list[torch.device]) -> dict[str, dict[str, Any]]:
    """Describe each kernel: does it run on any device, its largest share of each case, or why none."""
    served: dict[str, dict[str, float]] = {name: {} for name in kernels.KERNELS}
    for where in devices:
        for title, case in CASES.items():
            for name, share in serving(case, where).items():
                served[name][title] = max(share, served[name].get(title, 0.0))
    report: dict[str, dict[str, Any]] = {}
    for name in kernels.KERNELS:
        reasons = [_why_not(name, where) for where in devices]
        runs = None in reasons
        # Of the last device, which is the GPU where there is one: that the CPU cannot run it says nothing there.
        report[name] = {"available": runs, "serves": served[name], "why_not": None if runs else reasons[-1]}
    return report


def _why_not(name: str, where: torch.device) -> str | None:
    """Return what keeps a kernel from plain bfloat16 attention on the machine's last device."""
    with FakeTensorMode():
        probe = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device=where)
        why = kernels.why_not(name, probe, probe, Scores(1.0))
    # The kernels speak of the tensors that they were given; here there is only the machine.
    return _NO_CUDA if why and why.startswith("it needs CUDA tensors") else why
