"""Launches ``ringspan.gpu.attention`` on torch's tensors, in place, for R rows and K keys. Needs Triton."""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from ringspan.core.schedule.kernel_launches import KernelLaunch
from ringspan.gpu import attention, tuning
from ringspan.gpu.support import interprets_triton
from ringspan.gpu.table import Table
from ringspan.gpu.tuning import Blocks
from ringspan.torch.engine.kernels.contract import BackwardInputs, Scores


def _tuned(program: object, blocks: Blocks, sums: list[str]) -> Any:
    """Return the program with its best block sizes, tuned once per kind; for deterministic results, with fixed ones."""
    if interprets_triton():
        return tuning.interpreted(program)

    def fitting(_: list[Any], arguments: dict[str, Any], **options: int) -> list[Any]:
        found = blocks.configs(
            max(options["SIZE"], options["VALUE_SIZE"]) * arguments["q"].element_size()
        )
        return found[-1:] if torch.are_deterministic_algorithms_enabled() else found

    key = ["SIZE", "VALUE_SIZE", "HAS_CAP", "HAS_SLOPES", "bucket"]
    prune = {"early_config_prune": fitting}
    return triton.autotune(
        blocks.configs(0), key=key, restore_value=sums, prune_configs_by=prune
    )(program)


_forward: Final = _tuned(attention.forward, tuning.FORWARD, ["out", "lse"])
_backward_queries: Final = _tuned(
    attention.backward_queries, tuning.BACKWARD_QUERIES, ["dq"]
)
_backward_keys: Final = _tuned(
    attention.backward_keys, tuning.BACKWARD_KEYS, ["dk", "dv"]
)


class _OnDevice(NamedTuple):
    tiles: Tensor
    of_rows: tuple[Tensor, Tensor]
    of_keys: tuple[Tensor, Tensor]


@lru_cache(maxsize=256)
def _table(launch: KernelLaunch, device: torch.device) -> _OnDevice:
    table = Table.of(launch.tiles, launch.num_rows, launch.num_keys)
    tiles, *lists = (
        torch.from_numpy(x).to(device)
        for x in (table.tiles, *table.of_rows, *table.of_keys)
    )
    return _OnDevice(tiles, (lists[0], lists[1]), (lists[2], lists[3]))


def forward_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    launch: KernelLaunch,
    scores: Scores,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Add the launch's keys to the running (out, lse) of its rows: float32, (B, H, R, E) and (B, H, R)."""
    table = _table(launch, q.device)
    _forward[
        lambda meta: (triton.cdiv(q.shape[2], meta["ROWS"]), q.shape[0] * q.shape[1])
    ](
        q,
        k,
        v,
        out,
        lse,
        *_positions(q, scores),
        table.tiles,
        *table.of_rows,
        *_numbers(q, k, v, q.shape[2], scores),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        *lse.stride(),
        out,
        lse,
        **_options(q, v, scores),
    )


def backward_into(
    given: BackwardInputs,
    launch: KernelLaunch,
    scores: Scores,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add the launch's share to the running dq, dk and dv, in float32, from the global out and lse."""
    dout, q, k, v, out, lse = given
    table = _table(launch, q.device)
    delta = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    shared = *_positions(q, scores), table.tiles
    _backward_queries[
        lambda meta: (triton.cdiv(q.shape[2], meta["ROWS"]), q.shape[0] * q.shape[1])
    ](
        dout,
        q,
        k,
        v,
        out,
        lse,
        delta,
        dq,
        *shared,
        *table.of_rows,
        *_numbers(q, k, v, q.shape[2], scores),
        *dout.stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        *lse.stride(),
        *dq.stride()[:3],
        dq,
        **_options(q, v, scores),
        HAS_DELTA=False,
    )
    _backward_keys[
        lambda meta: (triton.cdiv(k.shape[2], meta["KEYS"]), k.shape[0] * k.shape[1])
    ](
        dout,
        q,
        k,
        v,
        lse,
        delta,
        dk,
        dv,
        *shared,
        *table.of_keys,
        *_numbers(q, k, v, q.shape[2], scores, k.shape[2]),
        *dout.stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *lse.stride(),
        *dk.stride()[:3],
        *dv.stride()[:3],
        dk,
        dv,
        **_options(q, v, scores),
    )


def _positions(q: Tensor, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    if scores.slopes is None:
        return q, q, q
    assert scores.query_positions is not None and scores.key_positions is not None, (
        "slopes need positions"
    )
    return (
        scores.slopes.contiguous(),
        scores.query_positions.contiguous(),
        scores.key_positions.contiguous(),
    )


def _numbers(
    q: Tensor, k: Tensor, v: Tensor, rows: int, scores: Scores, *num_keys: int
) -> tuple[Any, ...]:
    # Small problems are tuned separately, and so are runs that must be deterministic.
    heads, bucket = (
        q.shape[1],
        int(max(rows, k.shape[2]) >= 1024)
        + 2 * torch.are_deterministic_algorithms_enabled(),
    )
    sizes = q.shape[-1], v.shape[-1]
    return (
        heads,
        heads // k.shape[1],
        rows,
        *num_keys,
        *sizes,
        scores.scale,
        scores.softcap,
        bucket,
    )


def _options(q: Tensor, v: Tensor, scores: Scores) -> dict[str, Any]:
    return tuning.options(
        q.shape[-1],
        v.shape[-1],
        is_float32=q.dtype == torch.float32,
        has_cap=scores.softcap > 0,
        has_slopes=scores.slopes is not None,
    ) | {"IN_PLACE": True}
