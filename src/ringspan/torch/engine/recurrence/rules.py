"""Rules of stateful layers: tokens map a state affinely, ``A S + B``, and outputs are linear in it.

A rule wraps transformers' own function, or a kernel of flash-linear-attention or mamba-ssm with the same arguments.
T tokens, K key size, V value size, C channels, N state size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

Function = Callable[..., Any]
Arguments = Mapping[str, Any]


class Rule(ABC):
    """One kind of layer."""

    positional: ClassVar[tuple[str, ...]]  # arguments with other names in kernels
    # The dimension of tokens in each argument that has one; the batch comes first.
    dims: ClassVar[Mapping[str, int]]
    out_dim: ClassVar[int]
    states: ClassVar[tuple[str, ...]]  # arguments that request states
    # True if A is a matrix, applied from the left; False if it has factors of S's entries.
    is_matrix: ClassVar[bool]

    @abstractmethod
    def run(
        self, function: Function, arguments: Arguments, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and final state, given the initial one."""

    @abstractmethod
    def map_of(self, function: Function, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """Return A and B."""

    @abstractmethod
    def shapes(self, arguments: Arguments) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def called(
    rule: Rule, function: Function, arguments: Arguments, **more: object
) -> tuple[Tensor, Tensor]:
    """Wrap a function to take its first arguments by position."""
    first = [arguments[name] for name in rule.positional]
    return function(
        *first,
        **{name: x for name, x in arguments.items() if name not in rule.positional},
        **more,
    )


class DeltaRule(Rule):
    """The gated delta rule, and Kimi delta attention. q, k (B, T, H, K), v (B, T, H, V), S (B, H, K, V)."""

    positional = "query", "key", "value"
    dims: ClassVar[Mapping[str, int]] = {
        "query": 1,
        "key": 1,
        "value": 1,
        "g": 1,
        "beta": 1,
    }
    out_dim = 1
    states = "initial_state", "output_final_state"
    is_matrix = True

    def run(
        self, function: Function, arguments: Arguments, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return called(
            self, function, arguments, initial_state=state, output_final_state=True
        )

    def map_of(self, function: Function, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """Return A (B, H, K, K) and B (B, H, K, V) from one run with a wider value and initial state.

        The real values begin with zero and end with B. Values of zero that begin with the identity end with A, since
        only the rule's effect on a state remains.
        """
        (batch, heads, size, _), (*_, width) = self.shapes(arguments)
        value = arguments["value"]
        dtype = state_dtype(value.dtype)
        nothing = value.new_zeros((*value.shape[:-1], size))
        begin = torch.zeros(
            batch, heads, size, width + size, dtype=dtype, device=value.device
        )
        begin[..., width:] = torch.eye(size, dtype=dtype, device=value.device)
        _, end = self.run(
            function, {**arguments, "value": torch.cat((value, nothing), -1)}, begin
        )
        return end[..., width:], end[..., :width]

    def shapes(self, arguments: Arguments) -> tuple[tuple[int, ...], tuple[int, ...]]:
        (batch, _, heads, width), size = (
            arguments["value"].shape,
            arguments["key"].shape[-1],
        )
        return (batch, heads, size, size), (batch, heads, size, width)


class StateSpaceDual(Rule):
    """Mamba-2. x (B, T, H, V), B and C (B, T, G, N); S (B, H, V, N), A (B, H, 1, 1)."""

    positional = "hidden_states", "dt", "A", "B", "C", "chunk_size"
    dims: ClassVar[Mapping[str, int]] = {
        "hidden_states": 1,
        "dt": 1,
        "B": 1,
        "C": 1,
        "z": 1,
    }
    out_dim = 1
    states = "initial_states", "return_final_states"
    is_matrix = False

    def run(
        self, function: Function, arguments: Arguments, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return called(
            self, function, arguments, initial_states=state, return_final_states=True
        )

    def map_of(self, function: Function, arguments: Arguments) -> tuple[Tensor, Tensor]:
        _, end = self.run(function, arguments, None)
        steps = _steps(
            arguments["dt"],
            arguments.get("dt_bias"),
            softplus=bool(arguments.get("dt_softplus")),
        )
        low, high = arguments.get("dt_limit", (0.0, float("inf")))
        total = steps.clamp(low, high).to(end.dtype).sum(1)
        return (arguments["A"].to(end.dtype) * total).exp()[:, :, None, None], end

    def shapes(self, arguments: Arguments) -> tuple[tuple[int, ...], tuple[int, ...]]:
        (batch, _, heads, size), states = (
            arguments["hidden_states"].shape,
            arguments["B"].shape[-1],
        )
        return (batch, heads, 1, 1), (batch, heads, size, states)


class SelectiveScan(Rule):
    """Mamba. x and dt (B, C, T), B and C (B, N, T), A (C, N); S and A of a span (B, C, N).

    Kernels begin with a state of zero, so what another one contributes, ``C_t exp(A (dt_1 + ... + dt_t)) S``, is added.
    """

    positional = "hidden_states", "dt", "A", "B", "C"
    dims: ClassVar[Mapping[str, int]] = {
        "hidden_states": 2,
        "dt": 2,
        "B": 2,
        "C": 2,
        "z": 2,
    }
    out_dim = 2
    states = ("return_last_state",)
    is_matrix = False

    def run(
        self, function: Function, arguments: Arguments, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the kernel from zero, then add what ``state`` contributes to outputs and final state."""
        if state is None:
            return called(self, function, arguments, return_last_state=True)
        gate = arguments.get("z")
        without_gate = {name: x for name, x in arguments.items() if name != "z"}
        out, end = called(self, function, without_gate, return_last_state=True)
        times = self._times(arguments, state.dtype)
        a, c = arguments["A"].to(state.dtype), arguments["C"].to(state.dtype)
        added = sum(
            (a[:, n, None] * times).exp() * state[:, :, n, None] * c[:, None, n]
            for n in range(a.shape[1])
        )
        out = out + added
        end = end + (a * times[:, :, -1:]).exp() * state
        return (out if gate is None else out * functional.silu(gate)).to(
            without_gate["hidden_states"].dtype
        ), end

    def map_of(self, function: Function, arguments: Arguments) -> tuple[Tensor, Tensor]:
        _, end = self.run(function, arguments, None)
        dtype = state_dtype(end.dtype)
        return (
            arguments["A"].to(dtype) * self._times(arguments, dtype)[:, :, -1:]
        ).exp(), end.to(dtype)

    def shapes(self, arguments: Arguments) -> tuple[tuple[int, ...], tuple[int, ...]]:
        (batch, channels, _), states = (
            arguments["hidden_states"].shape,
            arguments["A"].shape[-1],
        )
        return (batch, channels, states), (batch, channels, states)

    @staticmethod
    def _times(arguments: Arguments, dtype: torch.dtype) -> Tensor:
        bias = arguments.get("delta_bias")
        steps = _steps(
            arguments["dt"],
            None if bias is None else bias[:, None],
            softplus=bool(arguments.get("delta_softplus")),
        )
        return steps.to(dtype).cumsum(2)


class Lightning(Rule):
    """``lightning_attention``. q, k (B, H, T, K), v (B, H, T, V); S (B, H, K, V), A (1, H, 1, 1)."""

    positional = "query", "key", "value", "slopes"
    dims: ClassVar[Mapping[str, int]] = {"query": 2, "key": 2, "value": 2}
    out_dim = 2
    states = ()
    is_matrix = False

    def run(
        self, function: Function, arguments: Arguments, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return called(self, function, arguments, state=state)

    def map_of(self, function: Function, arguments: Arguments) -> tuple[Tensor, Tensor]:
        _, end = self.run(function, arguments, None)
        decay = (-arguments["slopes"].to(end.dtype) * arguments["query"].shape[2]).exp()
        return decay.view(1, -1, 1, 1).expand(end.shape[0], -1, 1, 1), end

    def shapes(self, arguments: Arguments) -> tuple[tuple[int, ...], tuple[int, ...]]:
        (batch, heads, _, size), width = (
            arguments["key"].shape,
            arguments["value"].shape[-1],
        )
        return (batch, heads, 1, 1), (batch, heads, size, width)


def lightning_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    block_tokens: int = 256,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``S_t = exp(-slope_h) S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t`` in blocks of tokens; out, final state.

    q, k (B, H, T, K), v (B, H, T, V), slopes (H,). Source: Qin et al. 2024, "Lightning Attention-2", arXiv 2401.04658.
    """
    dtype = state_dtype(query.dtype)
    batch, heads, tokens, size = key.shape
    if state is None:
        state = torch.zeros(
            batch, heads, size, value.shape[-1], dtype=dtype, device=key.device
        )
    slopes = slopes.to(dtype).view(-1, 1, 1)
    outs: list[Tensor] = []
    for start in range(0, tokens, block_tokens):
        q, k, v = (
            x[:, :, start : start + block_tokens].to(dtype) for x in (query, key, value)
        )
        # The age of the state before the block, at each of its tokens.
        ages = torch.arange(1, q.shape[2] + 1, dtype=dtype, device=q.device)
        apart = ages[:, None] - ages
        decay = (-slopes * apart).masked_fill(apart < 0, float("-inf")).exp()
        within = ((q @ k.mT) * decay) @ v
        outs.append(
            (within + (q * (-slopes * ages[:, None]).exp()) @ state).to(query.dtype)
        )
        left = (-slopes * (len(ages) - ages)[:, None]).exp()
        state = (-slopes * len(ages)).exp() * state + (k * left).mT @ v
    return torch.cat(outs, 2), state


def _steps(dt: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt
