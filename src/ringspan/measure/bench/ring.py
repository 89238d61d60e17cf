"""One rank's whole schedule on one device, blocks copied in, against the fastest kernel on the same number of pairs."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspan.core import reference
from ringspan.core.errors import ConfigError
from ringspan.core.geometry.balanced import balanced
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import BatchLayoutName, KernelName
from ringspan.core.schedule.schedule import Schedule, make_schedule
from ringspan.core.schedule.steps import MESSAGES_PER_HOP
from ringspan.measure.machine import describe_machine
from ringspan.torch.engine import kernels
from ringspan.torch.engine.attention import ring
from ringspan.torch.engine.attention.arguments import check_tensors
from ringspan.torch.engine.attention.block import Block
from ringspan.torch.engine.attention.part import Ring, num_head_groups
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.kernels.contract import BackwardInputs, Scores
from ringspan.torch.engine.transport import clock
from ringspan.torch.engine.transport.exchange import PendingReceive, TensorSpec
from ringspan.torch.engine.transport.protocol import FakeTransport, MessageKey, Nobody
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.torch.runtime.launch import local_device

KINDS: Final = ("forward", "backward")
_PASSES: Final = {"forward": 1.0, "backward": 2.5}  # FLOPs in units of the forward pass
# About 5 ms, longer than the host takes to enqueue a pass of few and large launches.
_SLEEP_CYCLES: Final = 10_000_000
_SAMPLE: Final = 128  # rows per examined rank that are compared with float64


@dataclass(frozen=True, kw_only=True)
class RingCase:
    virtual_ranks: int = 8
    rank: int = 0
    tokens: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    mask: str = "causal"
    layout: BatchLayoutName = "zigzag"
    kernel: KernelName = "auto"
    route: str = "ring"
    repeats: int = 5
    error_ranks: tuple[int, ...] = (1, 8, 64)
    error_tokens: int = 4096


def run(case: RingCase) -> dict[str, Any]:
    """Measure a case: medians of interleaved repeats.

    ``efficiency``: FLOP/s of the rank's hops over the fastest single kernel's; ``transfer_share``: the part of the time
    with transfers that they cost, both of the device's time; ``host_seconds``: until all work is handed to it.
    ``errors`` of out and dq relative to float64, by number of ranks and of one kernel.
    """
    if not 0 <= case.rank < case.virtual_ranks:
        raise ConfigError(
            f"--rank {case.rank}: there are {case.virtual_ranks} virtual ranks; give 0 or more"
        )
    one = PlayedRank(case)
    with torch.no_grad():
        on, off = one.passes(is_moving=True), one.passes(is_moving=False)
        alone = one.single_kernels()
        everything = {"ring": on, "still": off, **alone}
        found = _interleaved(everything, case.repeats, one.device)
    seconds = {
        field: {
            name: {
                kind: median(getattr(each, field) for each in found[name][kind])
                for kind in KINDS
            }
            for name in found
        }
        for field in Timing._fields
    }
    device = seconds["device"]
    pairs = {
        "ring": one.schedule.num_pairs,
        **dict.fromkeys(alone, one.single.num_pairs),
    }
    flops = {
        name: {
            kind: one.flops(pairs[name]) * _PASSES[kind] / device[name][kind]
            for kind in KINDS
        }
        for name in pairs
    }
    fastest = {kind: max(alone, key=lambda name: flops[name][kind]) for kind in KINDS}
    return {
        "efficiency": {
            kind: flops["ring"][kind] / flops[fastest[kind]][kind] for kind in KINDS
        },
        "transfer_share": {
            kind: 1 - device["still"][kind] / device["ring"][kind] for kind in KINDS
        },
        "fastest_kernel": fastest,
        "flops_per_second": flops,
        "seconds": seconds["wall"],
        "device_seconds": device,
        "host_seconds": seconds["host"],
        "hops": len(one.schedule.hops),
        "single_tokens": one.single_layout.length,
        "errors": [error_row(case, ranks) for ranks in case.error_ranks],
        "config": asdict(case),
        "machine": describe_machine(),
    }


def _interleaved(
    everything: dict[str, dict[str, Callable[[], Any]]],
    repeats: int,
    device: torch.device,
) -> dict[str, dict[str, list["Timing"]]]:
    """Time every kind of call of everything in turn, again and again."""
    found: dict[str, dict[str, list[Timing]]] = {}
    for repeat in range(repeats + 1):
        # The order changes each time, as a run inherits the caches and clocks of the one before.
        order = np.random.default_rng(repeat).permutation(list(everything))
        for name in order.tolist():
            for kind in KINDS:
                took = Timing.of(everything[name][kind], device)
                if repeat:  # the first round warms up
                    found.setdefault(name, {}).setdefault(kind, []).append(took)
    return found


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Return a call's seconds, by the device's own clock if it has one."""
    clock.synchronize(device)
    start = clock.now(device)
    function()
    end = clock.now(device)
    clock.synchronize(device)
    return clock.seconds(start, end)


class Timing(NamedTuple):
    """Seconds of a call until the device is done, and of device and host each."""

    wall: float
    device: float
    host: float

    @staticmethod
    def of(function: Callable[[], Any], device: torch.device) -> "Timing":
        """Time a call twice on CUDA; the second time other work keeps the device from waiting for the host."""
        wall = timed(function, device)
        if device.type != "cuda":
            return Timing(wall, wall, wall)
        torch.cuda._sleep(_SLEEP_CYCLES)
        start, began = clock.now(device), time.perf_counter()
        function()
        host, end = time.perf_counter() - began, clock.now(device)
        clock.synchronize(device)
        return Timing(wall, clock.seconds(start, end), host)


class Copies:
    """A network that copies the blocks a rank would receive from this device's memory, on a side stream."""

    def __init__(self, device: torch.device, blocks: dict[int, Tensor]) -> None:
        self._blocks = blocks
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._zeros = torch.zeros(0, dtype=torch.uint8, device=device)

    def send(self, to: int, message: Tensor, key: MessageKey) -> None:
        """Drop the message."""

    def receive(
        self, pending: Sequence[PendingReceive], key: MessageKey
    ) -> Callable[[], None] | None:
        """Copy each message's values into its buffer on the side stream; return a function that waits for the copies.

        Blocks come from ``blocks`` by message number, gradients of other ranks are zeros. Without CUDA the copy is done
        at once.
        """
        sources = [self._source(key[1], each.spec) for each in pending]
        # Work that last used this memory may still be running.
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # pyright: ignore[reportArgumentType] - None changes no stream
            for each, source in zip(pending, sources, strict=True):
                each.read().copy_(source)
            if self._stream is None:
                return None
            copied = torch.cuda.Event()
            copied.record()
        # Keep the buffers until the copies are done.
        buffers = [each.read() for each in pending]

        def wait() -> None:
            torch.cuda.current_stream().wait_event(copied)
            buffers.clear()

        return wait

    def _source(self, message: int, spec: TensorSpec) -> Tensor:
        if message in self._blocks:
            return spec.on(self._blocks[message].view(torch.uint8)[: spec.nbytes])
        if self._zeros.numel() < spec.nbytes:
            self._zeros = self._zeros.new_zeros(spec.nbytes)
        return spec.on(self._zeros[: spec.nbytes])


class PlayedRank:
    """One rank's tensors, the others' blocks, and the single sequence to compare with."""

    def __init__(self, case: RingCase) -> None:
        """Draw one rank's random tensors, and find the schedules of its hops and of one sequence with the same pairs.

        ConfigError if the rank computes nothing under the mask; the kernel's refusal if it cannot serve these tensors.
        """
        self.case, self.device, self.dtype = (
            case,
            local_device(),
            dtype_named(case.dtype),
        )
        self.mask = Mask.parse(case.mask)
        self.layout = _layout(case)
        self.schedule = make_schedule(
            self.layout, self.mask, case.rank, None, case.route
        )
        if not self.schedule.num_pairs:
            raise ConfigError(
                f"--rank {case.rank}: has nothing to compute under the mask {case.mask}; use another"
            )
        self._generator = torch.Generator(self.device).manual_seed(0)
        tokens = self.layout.tokens_per_rank
        self.q, self.dout = (
            self.random(case.heads, tokens),
            self.random(case.heads, tokens),
        )
        self.k, self.v = (
            self.random(case.kv_heads, tokens),
            self.random(case.kv_heads, tokens),
        )
        check_tensors(self.q, self.k, self.v)
        self.scores = Scores(case.head_dim**-0.5)
        if refusal := kernels.why_not(case.kernel, self.q, self.v, self.scores):
            raise kernels.refused(case.kernel, refusal)
        self.single_layout = self._same_pairs()
        self.single = make_schedule(self.single_layout, self.mask, 0)

    def random(self, heads: int, tokens: int) -> Tensor:
        """Return random numbers (1, H, T, D), tokens before heads in memory, like the results of projections."""
        shape = 1, tokens, heads, self.case.head_dim
        return (
            torch.randn(shape, generator=self._generator, device=self.device)
            .to(self.dtype)
            .transpose(1, 2)
        )

    def flops(self, pairs: int) -> float:
        return 4.0 * pairs * self.case.heads * self.case.head_dim

    def passes(
        self, *, is_moving: bool, is_warm: bool = True
    ) -> dict[str, Callable[[], Any]]:
        """Return functions that run the rank's forward and backward; messages are copied in if ``is_moving``.

        Backward needs out and lse. If ``is_warm`` they come from a forward pass; else any numbers do, so that no pass
        has run.
        """
        k, v = self.k, self.v
        blank = ring_of(self.case, self.layout, self.q, k)
        # Any numbers do, as results are not compared: every owner's block gets the rank's own.
        blocks = _arriving(blank, k, lambda _, heads: (k[:, heads], v[:, heads]))
        mine = replace(
            blank,
            exchange=FakeTransport(
                Copies(self.device, blocks) if is_moving else Nobody()
            ),
        )
        lse = self.q.new_full(
            self.q.shape[:-1], math.log(self.layout.length), dtype=torch.float32
        )
        out, lse = (
            ring.forward(mine, self.q, self.k, self.v) if is_warm else (self.q, lse)
        )
        return {
            "forward": lambda: ring.forward(mine, self.q, self.k, self.v),
            "backward": lambda: ring.backward(
                mine, self.dout, self.q, self.k, self.v, out, lse
            ),
        }

    def single_kernels(self) -> dict[str, dict[str, Callable[[], Any]]]:
        """Return the passes of each fast kernel that serves, on one sequence with about the same pairs."""
        tokens = self.single_layout.length
        q, dout = (
            self.random(self.case.heads, tokens),
            self.random(self.case.heads, tokens),
        )
        k, v = (
            self.random(self.case.kv_heads, tokens),
            self.random(self.case.kv_heads, tokens),
        )
        names = kernels.serving("auto", q, v, self.scores)
        names = tuple(name for name in names if name != "eager") or names
        return {
            name: alone(name, self.single, self.scores, dout, q, k, v) for name in names
        }

    def _same_pairs(self) -> Layout:
        """Return the shortest single sequence with at least the pairs of this rank, by bisection."""
        low, high = 1, self.layout.length
        while low < high:
            middle = (low + high) // 2
            if (
                make_schedule(Layout("contiguous", middle, 1), self.mask, 0).num_pairs
                < self.schedule.num_pairs
            ):
                low = middle + 1
            else:
                high = middle
        return Layout("contiguous", low, 1)


def _layout(case: RingCase) -> Layout:
    length = case.virtual_ranks * case.tokens
    if case.layout == "balanced":
        return balanced(Mask.parse(case.mask), length=length, ranks=case.virtual_ranks)
    return Layout(case.layout, length, case.virtual_ranks)


def ring_of(case: RingCase, layout: Layout, q: Tensor, k: Tensor) -> Ring:
    schedule = make_schedule(layout, Mask.parse(case.mask), case.rank, None, case.route)
    spec = AttentionSpec(scale=case.head_dim**-0.5, mask=case.mask, kernel=case.kernel)
    return Ring(
        schedule,
        FakeTransport(Nobody()),
        Scores(spec.scale),
        spec,
        num_head_groups(q, k, schedule, schedule.blocks),
    )


def _arriving(
    one: Ring, k: Tensor, of: Callable[[int, slice], tuple[Tensor, Tensor]]
) -> dict[int, Tensor]:
    """Pack keys and values of every block that arrives, by message number; ``of`` gives an owner's tensors."""
    hops, found = one.schedule.hops, dict[int, Tensor]()
    for number, _, kv_heads in one.heads(k, k):
        if one.schedule.gathered is not None:
            own = Block.whole(*of(one.schedule.rank, kv_heads))
            found[MESSAGES_PER_HOP * number] = torch.cat(
                (own.k.flatten(), own.v.flatten())
            )
            continue
        for hop in hops[1:]:
            if hop.arrives.ranges:
                keys, values = of(hop.owner, kv_heads)
                block = Block(((0, keys.shape[2]),), keys, values).pack(
                    hop.arrives.ranges
                )
                assert block.buffer is not None, "a packed block has a buffer"
                found[MESSAGES_PER_HOP * (number * len(hops) + hop.index)] = (
                    block.buffer
                )
    return found


def alone(
    name: str,
    schedule: Schedule,
    scores: Scores,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> dict[str, Callable[[], Any]]:
    """Return one kernel's forward and backward of a sequence, as its launches only."""
    kernel, (hop,) = kernels.KERNELS[name], schedule.hops
    launches = kernel.launches(hop.bands)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    gradients = [
        torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v)
    ]

    def forward() -> None:
        for one in launches:
            rows, keys = slice(one.q0, one.q1), slice(one.k0, one.k1)
            inputs = q[:, :, rows], k[:, :, keys], v[:, :, keys], one, scores
            if kernel.adds_in_place is True:
                kernel.forward_into(*inputs, out[:, :, rows], lse[:, :, rows])
            else:
                kernel.forward(*inputs)

    def backward() -> None:
        """Run the kernel's backward for each launch, with any out and lse: they do not change the time."""
        for one in launches:
            rows, keys = slice(one.q0, one.q1), slice(one.k0, one.k1)
            mine = (
                dout[:, :, rows],
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                result[:, :, rows],
                norm[:, :, rows],
            )
            inputs = BackwardInputs(*mine)
            if kernel.adds_in_place is True:
                dq, dk, dv = gradients
                kernel.backward_into(
                    inputs, one, scores, dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
                )
            else:
                kernel.backward(inputs, one, scores)

    # Backward's out and lse: any numbers do.
    result, norm = (
        q,
        lse.new_full(lse.shape, math.log(k.shape[2])),
    )
    return {"forward": forward, "backward": backward}


def error_row(case: RingCase, ranks: int) -> dict[str, Any]:
    """Return relative errors of out and dq on the first, middle and last rank, and of one kernel."""
    small = replace(
        case,
        route="ring",
        virtual_ranks=ranks,
        rank=0,
        tokens=max(2, case.error_tokens // ranks),
    )
    layout = _layout(small)
    one = PlayedRank(replace(small, virtual_ranks=1, tokens=layout.length))
    q, k, v, dout, mask = one.q, one.k, one.v, one.dout, one.mask
    # Parts of the ring's result, of one kernel's, and of the exact one.
    found: dict[str, list[tuple[np.ndarray, ...]]] = {
        "out": [],
        "dq": [],
    }
    with torch.no_grad():
        whole = ring_of(small, one.layout, q, k)
        result = ring.forward(whole, q, k, v)
        alone = [result[0], ring.backward(whole, dout, q, k, v, *result)[0]]
        for rank in sorted({0, ranks // 2, ranks - 1}):
            positions = layout.positions(rank)
            mine = torch.from_numpy(positions).to(one.device)
            my_q, my_k, my_v, my_dout = (x[:, :, mine] for x in (q, k, v, dout))
            blank = ring_of(replace(small, rank=rank), layout, my_q, my_k)

            def of(owner: int, heads: slice) -> tuple[Tensor, Tensor]:
                there = torch.from_numpy(layout.positions(owner)).to(one.device)
                return k[:, heads, there], v[:, heads, there]

            here = replace(
                blank,
                exchange=FakeTransport(Copies(one.device, _arriving(blank, my_k, of))),
            )
            result = ring.forward(here, my_q, my_k, my_v)
            dq, _, _ = ring.backward(here, my_dout, my_q, my_k, my_v, *result)
            sample = np.random.default_rng(rank).permutation(len(positions))[:_SAMPLE]
            rows = positions[sample]
            allowed = mask.dense(rows, np.arange(layout.length))
            exact_q, exact_k, exact_v, exact_dout = (
                _exact(x) for x in (q[:, :, rows], k, v, dout[:, :, rows])
            )
            problem = exact_q, exact_k, exact_v, allowed, small.head_dim**-0.5
            expected = (
                reference.attention(*problem)[0],
                reference.backward(exact_dout, *problem).dq,
            )
            for name, x, one_kernel, right in zip(
                found, (result[0], dq), alone, expected, strict=True
            ):
                found[name].append(
                    (_exact(x[:, :, sample]), _exact(one_kernel[:, :, rows]), right)
                )
    errors: dict[str, Any] = {"ranks": ranks}
    for name, parts in found.items():
        *both, right = (
            np.concatenate(each, axis=2) for each in zip(*parts, strict=True)
        )
        errors[name], errors[f"alone_{name}"] = (
            float(np.linalg.norm(x - right) / np.linalg.norm(right)) for x in both
        )
    return errors


def _exact(x: Tensor) -> np.ndarray:
    return x.double().cpu().numpy()
