"""Memory timeline of a rank's second step and hop timeline of its third, by hooks: any loop can be profiled."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from ringspan.measure.trace.dry_run import hugging_face_config, prepare, thinned
from ringspan.measure.trace.tracker import MemoryTracker
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.shapes import ModelShape
from ringspan.torch.engine.transport.clock import Moment, now, seconds, synchronize
from ringspan.torch.engine.transport.collectives import gather
from ringspan.torch.engine.transport.exchange import recorded
from ringspan.torch.model.support import refuse_config
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.torch.runtime.mesh import init_mesh

PHASES: Final = ("forward", "loss", "backward", "optimizer")
NUM_STEPS: Final = 3  # the first settles, the second measures memory, the third time
_MEMORY_MOMENTS: Final = 250


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """A rank's timelines in seconds from the beginning of their step, as JSON values.

    ``memory``: "seconds", "phase" and a list of bytes per category; ``phases``, ``memory_phases``: (name, start);
    ``visits``: the hops' computations; ``passages``: exchanges with their waits.
    """

    rank: int
    device: str
    memory: dict[str, list[Any]]
    memory_phases: list[tuple[str, float]]
    peak_bytes: int
    step_seconds: float
    phases: list[tuple[str, float]]
    visits: list[dict[str, Any]] = field(default_factory=list)
    passages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exposed_seconds(self) -> float:
        return sum(each["arrived"] - each["waited"] for each in self.passages)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"exposed_seconds": self.exposed_seconds}


class Profiler:
    """Profiler of the first steps inside of ``step()``; then its hooks are gone."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        rank: int,
        snapshot: Path | None = None,
    ) -> None:
        """Watch a parallelized model and its optimizer; ``snapshot`` gets the memory step's CUDA allocator history."""
        self._model, self._optimizer, self._rank, self._snapshot = (
            model,
            optimizer,
            rank,
            snapshot,
        )
        self._device = next(model.parameters()).device
        self._tracker = MemoryTracker()
        self._num_steps = 0
        self._phases: list[tuple[str, Moment]] = []
        self._handles = [
            model.register_forward_pre_hook(lambda *_: self._begin("forward")),
            model.base_model.register_forward_hook(lambda *_: self._begin("loss")),
            model.register_forward_hook(lambda *_: self._begin("backward")),
            optimizer.register_step_pre_hook(lambda *_: self._begin("optimizer")),
            optimizer.register_step_post_hook(
                lambda *_: self._tracker.watch_optimizer(optimizer)
            ),
        ]
        self._memory: dict[str, Any] = {}
        self.result: RankProfile | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        self._num_steps += 1
        if self._num_steps < NUM_STEPS:
            with self._tracked(is_kept=self._num_steps == NUM_STEPS - 1):
                yield
        elif self._num_steps == NUM_STEPS:
            with self._timed():
                yield
        else:
            yield

    def _begin(self, phase: str) -> None:
        self._phases.append((phase, now(self._device)))
        if phase == "backward":
            self._tracker.keep()
        if phase == "optimizer":
            self._tracker.claim_gradients()
        self._tracker.phase = phase

    @contextmanager
    def _tracked(self, *, is_kept: bool) -> Iterator[None]:
        """Track the memory of a step; if ``is_kept`` store its moments and, on CUDA, the allocator's snapshot.

        Moments have times of the host, which allocates, and phases times of the device.
        """
        record = is_kept and self._device.type == "cuda" and self._snapshot is not None
        if record:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._phases.clear()
        # The host allocates, on CUDA too, so moments have its times.
        started, device_started = time.perf_counter(), now(self._device)
        with self._tracker:
            if self._num_steps == 1:
                self._tracker.watch_model(self._model)
            self._tracker.restart()
            yield
        if record:
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
        if is_kept:
            synchronize(self._device)
            shown = thinned(self._tracker.moments, _MEMORY_MOMENTS)
            categories = {
                name: [moment.bytes[name] for moment in shown]
                for name in shown[0].bytes
            }
            self._memory = {
                "memory": {"seconds": [moment.seconds - started for moment in shown]}
                | {"phase": [moment.phase for moment in shown]}
                | categories,
                "memory_phases": [
                    (name, seconds(device_started, moment))
                    for name, moment in self._phases
                ],
                "peak_bytes": self._tracker.peak.total_bytes,
            }

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Record a step's transfers, hops and phases on the device's clock, remove the hooks and build the profile."""
        self._phases.clear()
        started = now(self._device)
        try:
            with recorded() as (transfers, hops):
                yield
        finally:
            ended = now(self._device)
            for handle in self._handles:
                handle.remove()
        synchronize(self._device)

        def at(moment: Moment | None) -> float:
            assert moment is not None, "every hop ends and every exchange is waited for"
            return seconds(started, moment)

        self.result = RankProfile(
            rank=self._rank,
            device=torch.cuda.get_device_name(self._device)
            if self._device.type == "cuda"
            else "cpu",
            step_seconds=at(ended),
            phases=[(name, at(moment)) for name, moment in self._phases],
            visits=[
                {
                    "owner": h.owner,
                    "num_pairs": h.num_pairs,
                    "started": at(h.started),
                    "ended": at(h.ended),
                }
                for h in hops
            ],
            passages=[
                {
                    name: getattr(t, name)
                    for name in ("hop", "is_gradient", "sent_bytes", "received_bytes")
                }
                | {
                    name: at(getattr(t, name))
                    for name in ("posted", "waited", "arrived")
                }
                for t in transfers
            ],
            **self._memory,
        )


def profile_rank(
    shape: ModelShape, setting: Setting, folder: Path, doing: Callable[[str], None]
) -> list[RankProfile]:
    """Profile a model with random weights; every rank of the default group calls it, the first announces."""
    doing = doing if dist.get_rank() == 0 else lambda what: None
    mesh = init_mesh(ring=setting.ring)
    device = mesh.device_type
    torch.manual_seed(0)
    config = hugging_face_config(shape, setting.length)
    refuse_config(config)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=dtype_named(setting.parameter_dtype)
    ).train()
    setting = replace(setting, on_gpu=device == "cuda")
    model, optimizer, batch = prepare(model, mesh, setting)
    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    profiler = Profiler(model, optimizer, rank, folder / f"snapshot-{rank}.pickle")
    for number in range(NUM_STEPS):
        doing(f"step {number + 1} of {NUM_STEPS}")
        with profiler.step():
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return gathered(profiler)


def gathered(profiler: Profiler) -> list[RankProfile]:
    return gather(profiler.result)
