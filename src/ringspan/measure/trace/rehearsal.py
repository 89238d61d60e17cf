"""One rank of many on one device: real tensors, kernels and buffers, made-up neighbours, meaningless losses."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ringspan.core.errors import ConfigError
from ringspan.core.messages.units import shown_bytes
from ringspan.measure.machine import allocated_bytes
from ringspan.measure.trace import dry_run as dryrun
from ringspan.measure.trace.tracker import MemoryTracker, train_step
from ringspan.plan.cost.memory import training_memory
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.planner import Plan
from ringspan.torch.engine.transport.clock import Moment, now, seconds, synchronize
from ringspan.torch.engine.transport.exchange import (
    PendingReceive,
    TransferRecord,
    recorded,
)
from ringspan.torch.engine.transport.protocol import (
    FakeTransport,
    MessageKey,
    Nobody,
    transport_registered,
)
from ringspan.torch.model.layers.decoder import layers_of
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.torch.runtime.host import host_memory_bytes
from ringspan.torch.runtime.launch import local_device

_TIMED_STEPS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Measurements of one rank; ``exposed_seconds`` is its wait for blocks on a link of ``bandwidth``."""

    rank: int
    peak_bytes: int
    # The most that the allocator held of the device; on a CPU the peak.
    reserved_bytes: int
    bytes: dict[str, int]
    step_seconds: float
    layer_seconds: tuple[tuple[float, float], ...]
    """Forward and backward seconds (recomputation included) of each layer."""
    bandwidth: float
    exposed_seconds: float


def rehearse_plan(
    answer: Plan,
    rank: int,
    bandwidth: float,
    doing: Callable[[str], None] = lambda what: None,
) -> Rehearsal:
    """Run ``rank`` of a plan on this device, with made-up blocks from the other ranks; return what it measured.

    Raises if the whole model does not fit in host memory, or the rank's step not on the device.
    """
    device = local_device()
    setting = replace(answer.setting, on_gpu=device.type == "cuda")
    shape = answer.question.shape
    whole = setting.parameter_bytes * shape.parameters
    is_on_device = (
        device.type == "cuda" and whole < 0.8 * torch.cuda.mem_get_info(device)[0]
    )
    if not is_on_device:
        _refuse_more_than(host_memory_bytes(), whole, "the whole model", "this host")
    has = (
        torch.cuda.mem_get_info(device)[1]
        if device.type == "cuda"
        else host_memory_bytes()
    )
    _refuse_more_than(
        has,
        training_memory(shape, setting).peak_bytes,
        "a rank of this step",
        f"this {device.type}",
    )
    config = dryrun.hugging_face_config(shape, setting.length)
    return rehearse(
        config,
        setting,
        rank,
        bandwidth,
        doing,
        made_on=device if is_on_device else None,
    )


def refuse_local_ranks(shape: ModelShape, setting: Setting) -> None:
    """Check that this machine can hold all ranks of a setting."""
    on_gpu = local_device().type == "cuda"
    # With "auto" the route is not known yet: check the ring, as no route needs much less memory.
    needs = training_memory(
        shape, replace(setting, on_gpu=on_gpu, route="ring")
    ).peak_bytes
    has = (
        torch.cuda.mem_get_info()[1]
        if on_gpu
        else host_memory_bytes() // setting.devices
    )
    remedy = "take a shorter --length, a smaller --batch or a smaller --model"
    _refuse_more_than(
        has,
        needs,
        f"each of {setting.devices} ranks",
        "its part of this machine",
        remedy,
    )


def _refuse_more_than(
    has: int, needs: int, what: str, where: str,
    remedy: str = "rehearse with more --devices, a shorter --length or a smaller --model, or use plan --trace",
) -> None:  # fmt: skip
    if needs > has:
        raise ConfigError(
            f"{what} needs {shown_bytes(needs)} and {where} has {shown_bytes(has)}; {remedy}"
        )


def rehearse(
    config: PreTrainedConfig, setting: Setting, rank: int, bandwidth: float,
    doing: Callable[[str], None] = lambda what: None, made_on: torch.device | None = None,
) -> Rehearsal:  # fmt: skip
    """Run training steps as ``rank`` of ``ring x replicate`` on this process's device.

    ``peak_bytes``: the most that the allocator gave out in a step, kernels' buffers included; ``bytes``: tensors at
    their highest moment by category. Blocks arrive at ``bandwidth`` bytes/s. The whole model is made on the host, or
    ``made_on`` the device, a hundred times as fast.
    """
    dryrun.check_rank(config, setting, rank)
    device = local_device()
    torch.manual_seed(0)
    arrivals = _MadeUp()
    with (
        dryrun.fake_mesh(setting, rank, device.type) as mesh,
        transport_registered(
            mesh.get_group("ring"), lambda signature: FakeTransport(arrivals)
        ),
    ):
        doing(f"rehearsing rank {rank}: building the model")
        with made_on or nullcontext():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype_named(setting.parameter_dtype)
            ).train()
        model, optimizer, batch = dryrun.prepare(model, mesh, setting)
        # Track from the first step on, as FSDP allocates its buffers in it.
        with MemoryTracker() as tracker:
            arrivals.seen = tracker.communicate
            tracker.watch_model(model)
            for number in range(2):
                doing(f"memory: step {number + 1} of 2")
                dryrun.watch_step(tracker, model, optimizer, batch)
        arrivals.seen = None

        def step() -> None:
            train_step(MemoryTracker(), model, optimizer, batch)

        timed = []
        torch.cuda.empty_cache()
        for number in range(_TIMED_STEPS):
            doing(f"time: step {number + 1} of {_TIMED_STEPS}")
            timed.append(_timed_step(step, model, device, arrivals))
        doing("what kernels hold: the last step")
        held = (
            torch.cuda.memory_allocated(device)
            if device.type == "cuda"
            else tracker.moments[-1].total_bytes
        )
        peak = held + allocated_bytes(step)
        reserved = (
            torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak
        )
    typical = sorted(timed, key=lambda each: each.seconds)[len(timed) // 2]
    return Rehearsal(
        rank=rank,
        peak_bytes=peak,
        reserved_bytes=reserved,
        bytes=tracker.peak.bytes,
        step_seconds=typical.seconds,
        layer_seconds=typical.layers,
        bandwidth=bandwidth,
        exposed_seconds=exposed_seconds(typical.events, bandwidth),
    )


class _MadeUp(Nobody):
    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0  # spent on making blocks up

    def receive(self, pending: Sequence[PendingReceive], key: MessageKey) -> None:
        super().receive(pending, key)
        started = time.perf_counter()
        for block in (each.read() for each in pending):
            # Bytes 0x38 to 0x3F are high bytes of numbers below 1 in any dtype that reads them.
            block.normal_() if block.is_floating_point() else block.random_(0x38, 0x40)
        self.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class _Timed:
    seconds: float
    layers: tuple[tuple[float, float], ...]
    events: list[tuple[float, int, int]]


def _timed_step(
    step: Callable[[], None], model: nn.Module, device: torch.device, arrivals: _MadeUp
) -> _Timed:
    """Run a step; note its layers and when blocks were posted and needed; on a CPU without making blocks up."""
    before = arrivals.seconds
    with recorded() as (transfers, _), _layer_moments(model, device) as layers:
        started = now(device)
        step()
        ended = now(device)
    synchronize(device)
    made_up = arrivals.seconds - before if device.type == "cpu" else 0.0
    return _Timed(
        seconds(started, ended) - made_up, layers.seconds(), _events(transfers, started)
    )


def _events(
    transfers: list[TransferRecord], started: Moment
) -> list[tuple[float, int, int]]:
    """Return (seconds, transfer number, arriving bytes or -1 when needed), in order."""
    posted = [
        (seconds(started, each.posted), number, each.received_bytes)
        for number, each in enumerate(transfers)
    ]
    needed = [
        (seconds(started, each.waited), number, -1)
        for number, each in enumerate(transfers)
        if each.waited
    ]
    return sorted(posted + needed)


def exposed_seconds(events: list[tuple[float, int, int]], bandwidth: float) -> float:
    """Return a rank's wait when blocks arrive at ``bandwidth``, one after the other as posted."""
    # ``events`` are (seconds, number of an exchange, bytes, or -1 when needed), in order. A wait delays all that
    # follow.
    delay, free, arrival = 0.0, 0.0, dict[int, float]()
    for moment, number, num_bytes in events:
        if num_bytes >= 0:
            free = max(free, moment + delay) + num_bytes / bandwidth
            arrival[number] = free
        else:
            delay += max(0.0, arrival[number] - moment - delay)
    return delay


@dataclass
class _Layers:
    forward: dict[int, list[Moment]] = field(default_factory=dict)
    backward: dict[int, list[Moment]] = field(default_factory=dict)

    def seconds(self) -> tuple[tuple[float, float], ...]:
        return tuple(
            (seconds(*self.forward[n]), seconds(*self.backward[n]))
            for n in sorted(self.forward)
        )


@contextmanager
def _layer_moments(model: nn.Module, device: torch.device) -> Iterator[_Layers]:
    """Record layers' start and end by hooks in forward, and on input and output gradients."""
    layers, handles = _Layers(), []

    def begin(number: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if number not in layers.forward:  # recomputation does not count as forward
            layers.forward[number] = [now(device)]
            if args[0].requires_grad:
                args[0].register_hook(
                    lambda _: layers.backward[number].append(now(device))
                )

    def end(
        number: int, module: nn.Module, args: tuple[Tensor, ...], out: Tensor
    ) -> None:
        if len(layers.forward[number]) == 1:
            layers.forward[number].append(now(device))
            out.register_hook(lambda _: layers.backward.update({number: [now(device)]}))

    for number, module in enumerate(layers_of(model).values()):
        handles.append(module.register_forward_pre_hook(partial(begin, number)))
        handles.append(module.register_forward_hook(partial(end, number)))
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()
