"""An inference engine next to the training GPUs: what each of its GPUs holds, and how long weights take to it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.messages.units import shown_bytes
from ringspan.plan.cluster.devices import Device
from ringspan.plan.cost.setting import dtype_bytes
from ringspan.plan.generation.cost import Text, cached_numbers
from ringspan.plan.model.kinds import LayerKind
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.search import MOST, Question, divisors

# Share of a GPU that vLLM takes by default (--gpu-memory-utilization).
TAKEN: Final = 0.92
_ADAPTER_BYTES: Final = 4  # Adapters are trained and saved in float32.


@dataclass(frozen=True, kw_only=True)
class Engine:
    """``devices`` GPUs that hold one copy of a model's weights, and a cache for sequences of ``length`` tokens."""

    shape: ModelShape
    device: Device
    devices: int
    length: int
    dtype: str

    @cached_property
    def tensor(self) -> int:
        """GPUs of a node that split each layer (``--tensor-parallel-size``): the most that divide all heads."""
        heads = {kind.heads for kind in self.shape.kinds if kind.attends}
        return max(
            size
            for size in divisors(min(heads))
            if size <= self.device.devices_per_node
            and self.devices % size == 0
            and not any(count % size for count in heads)
        )

    @property
    def pipeline(self) -> int:
        """Stages of layers (``--pipeline-parallel-size``)."""
        return self.devices // self.tensor

    @property
    def usable_bytes(self) -> int:
        """Bytes of a GPU that vLLM takes for weights, cache and its own work."""
        return int(TAKEN * self.device.memory_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights per GPU."""
        return -(-dtype_bytes(self.dtype) * base_parameters(self.shape) // self.devices)

    @property
    def cache_bytes(self) -> int:
        """Bytes that weights leave for the cache per GPU, below 0 if they do not fit."""
        return self.usable_bytes - self.weight_bytes

    @cached_property
    def sequence_bytes(self) -> int:
        """Bytes per GPU that the cache of one whole sequence takes."""
        text = Text(prompt=self.length, new_tokens=1, dtype=self.dtype)
        numbers = sum(
            count * cached_numbers(text, self._share(kind), self.length, 0)
            for kind, count in self.shape.counted(self.shape.layers).items()
        )
        return -(-text.number_bytes * numbers // self.pipeline)

    @property
    def cache_tokens(self) -> int:
        """Tokens that all GPUs together cache, of sequences of this length."""
        return self.cache_bytes * self.length // self.sequence_bytes

    @property
    def has_stages(self) -> bool:
        """True if there is a layer for each stage."""
        return self.pipeline <= self.shape.layers

    @property
    def fits(self) -> bool:
        """True if weights fit, and the cache of one sequence with them."""
        return self.cache_bytes >= self.sequence_bytes

    def _share(self, kind: LayerKind) -> LayerKind:
        """Return what a GPU caches of a layer: its heads' keys, of one head at least; latents and entries are whole."""
        if kind.latent or kind.index:
            return kind
        return replace(kind, kv_heads=-(-kind.kv_heads // self.tensor))


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """An engine in addition to the devices of a question, and how weights reach it."""

    question: Question
    engine: Engine

    @property
    def link(self) -> str:
        """The link that weights take: inside a node if it has all GPUs of both, else between nodes."""
        both = self.question.devices + self.engine.devices
        in_node = both <= self.question.device.devices_per_node
        return "intra_node" if in_node else "inter_node"

    @property
    def handed_bytes(self) -> int:
        """Bytes of whole weights in the dtype of the parameters, with adapters merged."""
        number_bytes = dtype_bytes(self.question.parameter_dtype)
        return number_bytes * base_parameters(self.question.shape)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of only the adapter, 0 without one."""
        shape = self.question.shape
        return _ADAPTER_BYTES * shape.trained if shape.lora else 0

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds that bytes take at least: one GPU, the trainer's first, sends all of them."""
        return num_bytes / getattr(self.question.device, f"{self.link}_bandwidth")

    def as_json(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "devices": engine.devices,
            "tensor_parallel": engine.tensor,
            "pipeline_parallel": engine.pipeline,
            "dtype": engine.dtype,
            "usable_bytes": engine.usable_bytes,
            "weight_bytes": engine.weight_bytes,
            "cache_bytes": engine.cache_bytes,
            "cache_tokens": engine.cache_tokens,
            "sequences": engine.cache_bytes // engine.sequence_bytes,
            "link": self.link,
            "handed_bytes": self.handed_bytes,
            "hand_over_seconds": self.seconds(self.handed_bytes),
            "adapter_bytes": self.adapter_bytes,
            "adapter_seconds": self.seconds(self.adapter_bytes),
        }


def base_parameters(shape: ModelShape) -> int:
    """Return the parameters that an engine holds: all, without adapters."""
    return shape.parameters - (shape.trained if shape.lora else 0)


def plan_rollouts(question: Question, devices: int) -> Rollouts:
    """Return an engine of so many GPUs in addition to a question's devices.

    Raises:
        ConfigError: they hold no weights with one sequence, or are more than layers can be split over.
        UnsupportedError: a model whose layers have states.
    """
    shape, device, most = question.shape, question.device, MOST["devices"]
    if not 1 <= devices <= most:
        raise ConfigError(
            f"--rollouts {devices}: at least 1, and at most {most:,}, is needed"
        )
    if shape.has_states:
        raise UnsupportedError(
            f"--rollouts {devices}: {shape.name} has layers with states, and a plan counts only tokens in an "
            "engine's cache; leave it out"
        )
    engine = Engine(
        shape=shape,
        device=device,
        devices=devices,
        length=question.length,
        dtype=question.dtype,
    )
    if not engine.has_stages:
        raise ConfigError(
            f"--rollouts {devices}: --tensor-parallel-size {engine.tensor} leaves {engine.pipeline:,} stages, more "
            f"than the {shape.layers} layers of {shape.name}; give {_fewer(engine)}"
        )
    if not engine.fits:
        raise ConfigError(
            f"--rollouts {devices}: {shown_bytes(engine.weight_bytes)} of weights per GPU, and "
            f"{shown_bytes(engine.sequence_bytes)} of cache for one sequence of {question.length:,} tokens, do not fit "
            f"{shown_bytes(engine.usable_bytes)}, which vLLM takes of {device.title}; give {_more(engine)}"
        )
    return Rollouts(question=question, engine=engine)


def _fewer(engine: Engine) -> int:
    """Return the most GPUs below the engine's that have a layer for each stage; one GPU has."""
    shape = engine.shape
    first = min(engine.devices, shape.attention.heads * shape.layers)
    smaller = (replace(engine, devices=count) for count in range(first, 0, -1))
    return next(one.devices for one in smaller if one.has_stages)


def _more(engine: Engine) -> str:
    """Return the remedy for an engine that does not fit: the fewest GPUs that do, if any."""
    shape = engine.shape
    all_bytes = engine.weight_bytes * engine.devices
    counts = range(
        max(1, all_bytes // engine.usable_bytes),
        shape.attention.heads * shape.layers + 1,
    )
    larger = (replace(engine, devices=count) for count in counts)
    enough = (one.devices for one in larger if one.has_stages and one.fits)
    if fewest := next(enough, 0):
        return f"at least {fewest}"
    return "a shorter --length or another --device, as no number of these holds it"
