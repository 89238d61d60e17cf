"""The ring loop against ``core/schedule/events.py``: messages, their order and bytes, waits, and the peak."""
# Strategies give names as text.
# pyright: reportArgumentType=false, reportCallIssue=false

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import ringspan as rs
from ringspan.core.codec import Sent, codec
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.names import (
    COMM_DTYPE_NAMES,
    GRADIENT_COMM_DTYPE_NAMES,
    LAYOUT_NAMES,
)
from ringspan.core.schedule import events, steps
from ringspan.core.schedule.kernel_launches import KernelLaunch, pieces, whole
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.workspace import Gradients, Returning, Shape, Taken
from ringspan.measure.trace.tracker import MemoryTracker
from ringspan.torch.engine import kernels
from ringspan.torch.engine.attention import ring
from ringspan.torch.engine.attention.calls import calls_of
from ringspan.torch.engine.attention.part import Ring, accumulation_dtype
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.kernels.contract import ANY, Scores
from ringspan.torch.engine.kernels.device import ruled_by, rules_of
from ringspan.torch.engine.transport.exchange import PendingReceive, Transfer
from tests.core.strategies import custom_layouts, masks
from tests.fuzz import examples
from tests.torch.standins import installed

SCORES = Scores(1.0)
OF_CUDA = ("cudnn", "flash", "flash2", "flash3", "flash4")
ROUTES = (
    "ring",
    "bidirectional",
    "double-ring:2",
    "double-ring:3",
    "all-gather",
    "pass-q",
)


class Alone:
    """Stands in for the exchange of one rank whose peers are nowhere: zeros arrive at once."""

    def __init__(self):
        self.log = []

    def empty(self, spec):
        return spec.empty()

    def post(self, sends, receives, message):
        pending = [PendingReceive.of(peer, asked) for peer, asked in receives]
        for each in pending:
            each.read().zero_()
        if not sends and not receives:
            return Transfer([], []), pending
        sent, received = (
            [(peer, x.nbytes) for peer, x in each] for each in (sends, receives)
        )
        self.log.append(("post", message, sent, received))
        waited = partial(self.log.append, ("wait", message))
        return Transfer(
            [], [buffer for _, buffer in sends], None, lambda: waited() and pending
        ), pending


class Nothing:
    """A kernel that adds nothing to what is there, and needs nothing for it."""

    name, memory, launches, adds_in_place = "triton", ANY, staticmethod(whole), True

    def why_not(self, *arguments):
        return "it computes nothing"

    def forward_into(self, *arguments):
        pass

    def backward_into(self, *arguments):
        pass


class Call(NamedTuple):
    """A launch that was computed: bytes at most while it ran, those of its results, and whether merging copies them."""

    launch: KernelLaunch
    most: int
    results: int
    converts: bool
    each: tuple[int, ...]


class Recorded:
    """A kernel that remembers what it takes."""

    def __init__(self, kernel, tracker, calls):
        self.name, self.memory = kernel.name, kernel.memory
        self.launches, self.why_not = kernel.launches, kernel.why_not
        self._kernel, self._tracker, self._calls = kernel, tracker, calls

    def _call(self, name, launch, *arguments):
        before, first = sum(self._tracker._totals.values()), len(self._tracker.moments)
        results = getattr(self._kernel, name)(*arguments)
        most = max(
            (moment.total_bytes for moment in self._tracker.moments[first:]),
            default=before,
        )
        after = sum(self._tracker._totals.values())
        converts = results is not None and results[0].dtype == torch.bfloat16
        each = tuple(x.untyped_storage().nbytes() for x in results or ())
        self._calls.append(
            Call(launch, max(most, after) - before, after - before, converts, each)
        )
        return results


class RecordedReturning(Recorded):
    adds_in_place = False

    def forward(self, q, k, v, launch, scores):
        return self._call("forward", launch, q, k, v, launch, scores)

    def backward(self, given, launch, scores):
        return self._call("backward", launch, given, launch, scores)


class RecordedInPlace(Recorded):
    adds_in_place = True

    def forward_into(self, q, k, v, launch, *rest):
        self._call("forward_into", launch, q, k, v, launch, *rest)

    def backward_into(self, given, launch, *rest):
        self._call("backward_into", launch, given, launch, *rest)


class Replayed:
    """What a kernel took, launch by launch, as the argument of the events."""

    def __init__(self, calls, choose):
        self._calls, self._choose = iter(calls), choose

    def launches(self, tiles):
        return self._choose(tiles).launches(tiles)

    def forward_bytes(self, launch):
        call = next(self._calls)
        assert call.launch == launch
        return Taken(call.most, call.results, call.converts)

    def backward_bytes(self, launch):
        call = next(self._calls)
        assert call.launch == launch
        return Gradients(call.most, call.each or (0, 0, 0), call.converts)


def numbers(shape, tokens, key_tokens, dtype):
    """dout, q, k, v, out and lse, zeros."""
    queries, keys = (
        (shape.batch, shape.heads, tokens),
        (shape.batch, shape.kv_heads, key_tokens),
    )
    sizes = (
        (*queries, shape.value_dim),
        (*queries, shape.head_dim),
        (*keys, shape.head_dim),
        (*keys, shape.value_dim),
    )
    dout, q, k, v = (torch.zeros(size, dtype=dtype) for size in sizes)
    return (
        dout,
        q,
        k,
        v,
        dout.clone(),
        torch.zeros(queries, dtype=accumulation_dtype(dtype)),
    )


def held(part, walk):
    """The posts and waits of a pass as the exchange logs them, and the most bytes that are held."""
    log, now, most = [], 0, 0
    for event in walk(part):
        match event:
            case steps.Make(buffer):
                now += buffer.num_bytes
            case steps.Free(buffer):
                now -= buffer.num_bytes
            case steps.Post(number, sends, receives):
                log.append(
                    (
                        "post",
                        number,
                        *(
                            [(m.peer, m.buffer.num_bytes) for m in each]
                            for each in (sends, receives)
                        ),
                    )
                )
            case steps.Wait(number):
                log.append(("wait", number))
            case (
                steps.Compute(_, num_bytes)
                | steps.Launch(num_bytes)
                | steps.Accumulate(num_bytes)
                | steps.Convert(num_bytes)
            ):
                most = max(most, now + num_bytes)
        most = max(most, now)
    assert now == 0, "everything is free at the end"
    return log, most


def both(part, loop, arguments, kernel, **options):
    """What a pass of one rank logs and holds at most beside its results: by the loop, and by the events."""
    tracker, exchange, calls = MemoryTracker(), Alone(), []
    codes = {
        "sent": Sent(part.shape.sent_as.name, part.sent.gradients),
    }
    spec = AttentionSpec(scale=SCORES.scale, kernel=kernel, **codes)
    mine = Ring(part.schedule, exchange, SCORES, spec, part.head_groups)
    table = {
        name: (RecordedInPlace if one.adds_in_place else RecordedReturning)(
            one, tracker, calls
        )
        for name, one in (kernels.KERNELS | {"triton": Nothing()}).items()
    }
    with torch.no_grad(), kernels.registered(*table.values()):
        if kernel in OF_CUDA:  # they remember where sequences are cut
            loop(replace(mine, exchange=Alone()), *arguments, **options)
            calls.clear()
        with tracker:
            results = loop(mine, *arguments, **options)
        q, k, v = arguments[1:4] if loop is ring.backward else arguments
        serving = kernels.serving(kernel, q, v, SCORES)
        _, heads, _ = mine.heads(q, k)[0]
        walk, choose = events.forward, partial(kernels.choose, serving, q=q[:, heads])
        if loop is ring.backward:
            walk = events.backward
        if part.schedule.gathered is not None:
            found = calls_of(
                part.schedule, serving, q[:, heads], is_backward=loop is ring.backward
            )
            choose = lambda tiles: found.calls[0][0]  # noqa: E731
        replayed = Replayed(calls, choose)
        counted = held(replace(part, kernel=replayed), walk)
    most = max((moment.total_bytes for moment in tracker.moments), default=0)
    return (exchange.log, most - sum(x.nbytes for x in results)), counted


# Everything at once on every route; then what each of the kernels takes.
_ALL = {
    "length": 61,
    "keys": None,
    "mask": rs.sliding_window(17),
    "layout": "zigzag",
    "ranks": 6,
    "batch": 2,
}
_ALL |= {"grouping": (8, 4, 2), "sizes": (8, 8), "shares": True, "in_place": True}
_TYPES = {
    "dtype": torch.bfloat16,
    "comm_dtype": "int8",
    "gradient_comm_dtype": "bfloat16",
}
_EXACT = {"dtype": torch.float32, "comm_dtype": "exact", "gradient_comm_dtype": "exact"}


def each(name, values, **others):
    """An example for each value of one argument."""

    def decorate(test):
        for value in values:
            test = example(**others | {name: value})(test)
        return test

    return decorate


@each("route", ROUTES, kernel="cpu", rank=1, **_ALL | _TYPES)
@each(
    "kernel",
    ("auto", "eager", "triton", *OF_CUDA),
    route="bidirectional",
    rank=2,
    **_ALL | _EXACT,
)
@example(
    route="ring",
    kernel="cpu",
    rank=1,
    **_ALL | _TYPES | {"layout": CustomLayout.of([[(0, 9)], []], length=9)},
)
@example(  # what is held beside the queries that travel is the most only where there is little else
    length=2, keys=None, mask=rs.causal(), layout="zigzag", ranks=2, rank=0, route="pass-q", batch=1,
    grouping=(4, 2, 2), sizes=(8, 8), dtype=torch.bfloat16, comm_dtype="exact", gradient_comm_dtype="exact",
    kernel="triton", shares=False, in_place=False,
)  # fmt: skip
@given(
    length=st.integers(1, 70),
    keys=st.none() | st.integers(1, 70),
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES) | st.integers(1, 8).flatmap(custom_layouts),
    ranks=st.integers(1, 8),
    rank=st.integers(0, 7),
    route=st.sampled_from(ROUTES),
    batch=st.integers(1, 2),
    grouping=st.sampled_from([(1, 1, 1), (4, 2, 1), (4, 2, 2), (6, 3, 3), (8, 4, 2)]),
    sizes=st.sampled_from([(8, 8), (12, 8), (5, 7)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    comm_dtype=st.sampled_from(COMM_DTYPE_NAMES),
    gradient_comm_dtype=st.sampled_from(GRADIENT_COMM_DTYPE_NAMES),
    kernel=st.sampled_from(["auto", "cpu", "eager", "triton", *OF_CUDA]),
    shares=st.booleans(),
    in_place=st.booleans(),
)
@examples(
    100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
def test_the_loop_sends_waits_and_holds_what_its_events_say(
    length, keys, mask, layout, ranks, rank, route, batch, grouping, sizes, dtype, comm_dtype, gradient_comm_dtype,
    kernel, shares, in_place,
):  # fmt: skip
    """``shares``: dk and dv are asked for in float32, as where members of a Ulysses group share a head."""
    heads, kv_heads, head_groups = grouping
    split = layout, layout
    if isinstance(layout, str):
        split = (
            rs.Layout(layout, length, ranks),
            rs.Layout(layout, keys or length, ranks),
        )
    ranks = split[0].ranks
    assume(rank < ranks and not ranks % (int(route[-1]) if ":" in route else 1))
    # as their stand-ins compute
    assume(dtype == torch.float32 or kernel not in OF_CUDA)
    way, sums = Route.parse(route, ranks), accumulation_dtype(dtype)
    tokens, key_tokens = (one.tokens_of(rank) for one in split)
    sent_as = codec("exact" if way.passes_queries else comm_dtype)
    shape = Shape(batch, heads, kv_heads, *sizes, dtype.itemsize, sent_as=sent_as)
    part = steps.Part(
        make_schedule(split[0], mask, rank, split[1], way),
        shape,
        tokens,
        key_tokens,
        head_groups=head_groups,
        sent=Sent(gradients=gradient_comm_dtype),
        in_place=in_place,
    )
    dout, q, k, v, out, lse = numbers(shape, tokens, key_tokens, dtype)
    rules = replace(rules_of(q.device), cuts_for_cores=not in_place)
    with installed() if kernel in OF_CUDA else nullcontext(), ruled_by(cpu=rules):
        real, counted = both(part, ring.forward, (q, k, v), kernel)
        assert counted == real
        schedule = make_schedule(split[0], mask, rank, split[1], way.backward)
        back = replace(
            part, schedule=schedule, kv_itemsize=sums.itemsize if shares else None
        )
        options = {"kv_dtype": sums if shares else None}
        real, counted = both(
            back, ring.backward, (dout, q, k, v, out, lse), kernel, **options
        )
        assert counted == real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", ["ring", "pass-q"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_a_plan_and_the_loop_take_the_same_kernel(layout, route, dtype):
    """One that returns what it makes of each piece, and one that adds up in place and needs nothing beside."""
    split, ranks, groups = rs.Layout(layout, 96, 4), 4, 2
    shape = Shape(2, 4, 2, 8, 8, dtype.itemsize)
    dout, q, k, v, out, lse = numbers(
        shape, split.tokens_per_rank, split.tokens_per_rank, dtype
    )
    way = Route.parse(route, ranks)
    for loop, walk, arguments, there in (
        (ring.forward, events.forward, (q, k, v), way),
        (ring.backward, events.backward, (dout, q, k, v, out, lse), way.backward),
    ):
        tokens = split.tokens_per_rank
        part = steps.Part(
            make_schedule(split, rs.causal(), 3, None, there),
            shape,
            tokens,
            tokens,
            head_groups=groups,
        )
        for name, kernel in (("cpu", Returning(part.group, pieces)), ("triton", None)):
            real, _ = both(part, loop, arguments, name)
            assert held(replace(part, kernel=kernel), walk) == real


class Copies(TorchDispatchMode):
    """How many numbers are copied."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.numbers += (
            args[0].numel() if operator is torch.ops.aten.copy_.default else 0
        )
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("in_place", [True, False])
def test_gathered_keys_are_copied_by_their_owner_alone(in_place):
    """Where they arrive where they are used; on a CPU, what is sent is packed, and what arrives is copied as well."""
    layout, shape = rs.Layout("zigzag", 96, 4), Shape(1, 4, 2, 8, 8, 4)
    _, q, k, v, _, _ = numbers(shape, 24, 24, torch.float32)
    schedule, spec = (
        make_schedule(layout, rs.causal(), 1, None, "all-gather"),
        AttentionSpec(scale=1.0, kernel="triton"),
    )
    assert schedule.gathered is not None
    rules = replace(rules_of(q.device), cuts_for_cores=not in_place)
    with (
        kernels.registered(Nothing()),
        ruled_by(cpu=rules),
        torch.no_grad(),
        Copies() as copies,
    ):
        ring.forward(Ring(schedule, Alone(), SCORES, spec), q, k, v)
    own, there = (tokens * 2 * (8 + 8) for tokens in (24, schedule.gathered.num_keys))
    assert copies.numbers == own if in_place else copies.numbers > there
