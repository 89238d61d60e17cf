"""FlashAttention 2, 3 and 4: PyTorch's own build of 2, and the packages if installed.

All take any band as a window, grouped heads as they are, and packed documents as consecutive sequences (varlen), and
return the natural log-sum-exp.
"""

from functools import lru_cache
from importlib import import_module
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import (
    KernelLaunch,
    KernelLaunches,
    Window,
    windows,
)
from ringspan.torch.engine.kernels import device
from ringspan.torch.engine.kernels.contract import (
    FOR_TENSOR_CORES,
    BackwardInputs,
    Scores,
    one_size,
    too_large,
)

_LARGEST_HEAD: Final = 256
_HEAD_MULTIPLE: Final = 8


class Cuts(NamedTuple):
    """Ends of the sequences packed in q and k, from 0 (int32, one more than sequences), and the longest of each."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


class Asked(NamedTuple):
    """Options of a call: the sequences packed in the tensors (None if it is one), their common band, and the scores."""

    cuts: Cuts | None
    window: Window
    scores: Scores

    @property
    def is_causal(self) -> bool:
        return self.window == (-1, 0)


class Calls(Protocol):
    """One build of FlashAttention on (B, T, H, D), lse (B, H, T); packed on (T, H, D) and (H, T)."""

    @property
    def capability(self) -> tuple[int, int]: ...

    takes_softcap: bool

    @property
    def package(self) -> tuple[str, str] | None: ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, asked: Asked
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, given: BackwardInputs, asked: Asked
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Flash:
    """Any tile in half precision on CUDA; adjacent tiles with the same window are one call."""

    memory = FOR_TENSOR_CORES
    adds_in_place: Literal[False] = False

    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self._calls = name, calls

    def why_not(self, q: Tensor, v: Tensor, scores: Scores) -> str | None:
        calls = self._calls
        reason = device.half_precision_on_cuda(q, calls.capability)
        if (
            reason is None
            and calls.package
            and not device.rules_of(q.device).has_package(calls.package[0])
        ):
            return f"{calls.package[1]} is not installed"
        if reason := reason or too_large(q, v, _LARGEST_HEAD):
            return reason
        if scores.slopes is not None:
            return "it does not know the positions that ALiBi slopes need"
        if scores.softcap and not calls.takes_softcap:
            return "it has no softcap"
        return scores.lifts_masked

    def launches(self, tiles: tuple[Tile, ...]) -> KernelLaunches:
        return windows(tiles)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, launch: KernelLaunch, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return out (B, H, rows, E) and lse (B, H, rows) of a launch, whose tiles have one window.

        Several tiles are packed sequences of one varlen call over the batch.
        """
        value_size = v.shape[-1]
        q, k, v = (
            x.transpose(1, 2) for x in one_size(q, k, v, multiple=_HEAD_MULTIPLE)
        )
        window = Window.of(launch.tiles[0])
        if len(launch.tiles) == 1:
            out, lse = self._calls.forward(q, k, v, Asked(None, window, scores))
            return out[..., :value_size].transpose(1, 2), lse[..., : launch.num_rows]
        asked = Asked(_cuts(launch, len(q), q.device), window, scores)
        out, lse = self._calls.forward(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), asked
        )
        lse = (
            lse[..., : len(q) * launch.num_rows]
            .unflatten(1, (len(q), -1))
            .transpose(0, 1)
        )
        # For a row without keys these kernels return +inf.
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        return out.unflatten(0, q.shape[:2])[..., :value_size].transpose(1, 2), lse

    def backward(
        self, given: BackwardInputs, launch: KernelLaunch, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the launch's share of dq, dk and dv, given the global out and lse; several tiles are one call."""
        dout, q, k, v, out, lse = given
        size, value_size = q.shape[-1], v.shape[-1]
        tensors = [
            x.transpose(1, 2)
            for x in one_size(dout, q, k, v, out, multiple=_HEAD_MULTIPLE)
        ]
        batch, window, cuts = len(q), Window.of(launch.tiles[0]), None
        if len(launch.tiles) > 1:
            cuts = _cuts(launch, batch, q.device)
            tensors = [x.flatten(0, 1) for x in tensors]
            lse = lse.transpose(0, 1).flatten(1, 2)
        gradients = self._calls.backward(
            BackwardInputs._make([*tensors, lse.contiguous()]),
            Asked(cuts, window, scores),
        )
        if cuts:
            gradients = tuple(x.unflatten(0, (batch, -1)) for x in gradients)
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        return dq[..., :size], dk[..., :size], dv[..., :value_size]


@lru_cache(maxsize=256)
def _cuts(launch: KernelLaunch, batch: int, where: torch.device) -> Cuts:
    """Return the launch's tiles as sequences, for every batch entry; gaps have no keys or queries."""
    # Varlen kernels want every row and key in some sequence. Rows between tiles become a sequence without keys, and
    # keys between tiles one without queries; ``groupby`` drops those that are empty on both sides.
    ends = [(0, 0)]
    for entry in range(batch):
        row, key = entry * launch.num_rows, entry * launch.num_keys
        for tile in launch.tiles:
            ends += [
                (row + tile.q0, ends[-1][1]),
                (row + tile.q0, key + tile.k0),
                (row + tile.q1, key + tile.k1),
            ]
        ends += [
            (row + launch.num_rows, ends[-1][1]),
            (row + launch.num_rows, key + launch.num_keys),
        ]
    cuts = torch.tensor([end for end, _ in groupby(ends)], dtype=torch.int32)
    most_queries, most_keys = cuts.diff(dim=0).amax(0).tolist()
    queries, keys = (one.contiguous().to(where) for one in cuts.unbind(1))
    return Cuts(queries, keys, most_queries, most_keys)


class TorchFlash:
    """``aten::_flash_attention_forward`` and its backward: FlashAttention 2 as PyTorch builds it, since 2.11."""

    capability = (8, 0)
    takes_softcap = False
    package = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, asked: Asked
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *_cut(asked.cuts, q, k),
            0.0,
            asked.is_causal,
            False,
            scale=asked.scores.scale,
            window_size_left=asked.window.left,
            window_size_right=asked.window.right,
        )
        return out, lse

    def backward(
        self, given: BackwardInputs, asked: Asked
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = given
        # The state of a random generator, which is read only for dropout.
        no_dropout = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, device=q.device),
        )
        return torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            *_cut(asked.cuts, q, k),
            0.0,
            asked.is_causal,
            *no_dropout,
            scale=asked.scores.scale,
            window_size_left=asked.window.left,
            window_size_right=asked.window.right,
        )


class Flash2:
    """The package flash-attn, from 2.7 on."""

    capability = (8, 0)
    takes_softcap = True
    package = "flash_attn.flash_attn_interface", "flash-attn (pip install flash-attn)"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, asked: Asked
    ) -> tuple[Tensor, Tensor]:
        package = import_module("flash_attn.flash_attn_interface")
        options: dict[str, Any] = _flash2_options(asked) | {"return_softmax": False}
        if asked.cuts is None:
            out, lse, *_ = package._flash_attn_forward(q, k, v, **options)
        else:
            out, lse, *_ = package._flash_attn_varlen_forward(
                q, k, v, *asked.cuts, **options
            )
        return out, lse

    def backward(
        self, given: BackwardInputs, asked: Asked
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv by the package's private functions, whose public ones are bound to its own autograd."""
        dout, q, k, v, out, lse = given
        package = import_module("flash_attn.flash_attn_interface")
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options: dict[str, Any] = _flash2_options(asked) | {
            "deterministic": _is_deterministic()
        }
        if asked.cuts is None:
            package._flash_attn_backward(dout, q, k, v, out, lse, *gradients, **options)
        else:
            package._flash_attn_varlen_backward(
                dout, q, k, v, out, lse, *gradients, *asked.cuts, **options
            )
        return gradients


class Flash3:
    """The package flash_attn_3 (Hopper), by the operators that it registers with torch."""

    capability = (9, 0)
    takes_softcap = True
    package = (
        "flash_attn_interface",
        "flash_attn_3 (from the folder hopper of flash-attention's sources)",
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, asked: Asked
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse by the registered operator; its unused arguments are given as nothing, in their order."""
        import_module("flash_attn_interface")
        queries, keys, most_queries, most_keys = asked.cuts or (None, None, None, None)
        window, scores = asked.window, asked.scores
        out, lse, *_ = torch.ops.flash_attn_3.fwd(
            q,
            k,
            v,
            None,
            None,
            None,
            None,  # new keys and values, qv, out
            queries,
            keys,
            None,
            None,
            None,
            most_queries,
            most_keys,
            None,
            None,
            None,  # pages, batch indices, padding on the left
            None,
            None,
            None,
            None,
            None,
            None,  # rotary embedding, scales of 8-bit tensors
            scores.scale,
            asked.is_causal,
            window.left,
            window.right,
            0,
            scores.softcap,
            True,
            None,
            1,
            None,
            0,  # rotary order, scheduler, splits, packed groups, multiprocessors to leave
        )
        return out, lse

    def backward(
        self, given: BackwardInputs, asked: Asked
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv by the registered operator, which writes them into tensors that it is given."""
        dout, q, k, v, out, lse = given
        import_module("flash_attn_interface")
        queries, keys, most_queries, most_keys = asked.cuts or (None, None, None, None)
        window, scores = asked.window, asked.scores
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn_3.bwd(
            dout,
            q,
            k,
            v,
            out,
            lse,
            *gradients,
            queries,
            keys,
            None,
            None,
            most_queries,
            most_keys,
            scores.scale,
            asked.is_causal,
            window.left,
            window.right,
            scores.softcap,
            _is_deterministic(),
            0,
        )
        return gradients


class Flash4:
    """The package flash-attn-4, flash_attn.cute (Hopper and Blackwell), as of 4.0.0b36."""

    capability = (9, 0)
    takes_softcap = False
    package = (
        "flash_attn.cute.interface",
        "flash-attn-4 (pip install 'flash-attn-4[cu13]', or ringspan's extra flash)",
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, asked: Asked
    ) -> tuple[Tensor, Tensor]:
        package = import_module("flash_attn.cute.interface")
        out, lse, *_ = package._flash_attn_fwd(
            q, k, v, return_lse=True, **_flash4_options(asked)
        )
        return out, lse

    def backward(
        self, given: BackwardInputs, asked: Asked
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = given
        package = import_module("flash_attn.cute.interface")
        options = _flash4_options(asked) | {"deterministic": _is_deterministic()}
        dq, dk, dv, *_ = package._flash_attn_bwd(q, k, v, out, dout, lse, **options)
        return dq, dk, dv


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _cut(
    cuts: Cuts | None, q: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor | None, int, int]:
    return cuts or (None, None, q.shape[1], k.shape[1])


def _flash2_options(asked: Asked) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": asked.scores.scale,
        "causal": asked.is_causal,
        "window_size_left": asked.window.left,
        "window_size_right": asked.window.right,
        "softcap": asked.scores.softcap,
        "alibi_slopes": None,
    }


def _flash4_options(asked: Asked) -> dict[str, Any]:
    cuts, window = asked.cuts, asked.window
    return {
        "softmax_scale": asked.scores.scale,
        "causal": asked.is_causal,
        # Its bounds may be negative, so no bound is None.
        "window_size_left": None if window.left < 0 else window.left,
        "window_size_right": None
        if window.right < 0 or asked.is_causal
        else window.right,
        "cu_seqlens_q": cuts and cuts.queries,
        "cu_seqlens_k": cuts and cuts.keys,
        "max_seqlen_q": cuts and cuts.most_queries,
        "max_seqlen_k": cuts and cuts.most_keys,
    }
