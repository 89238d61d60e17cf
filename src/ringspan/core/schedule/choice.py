"""Choice of the quickest route by ``timing``, and of head groups."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.messages.numbers import check_whole
from ringspan.core.schedule.route import Route, member_heads
from ringspan.core.schedule.timing import Speeds, forward_pass, sent_bytes
from ringspan.core.schedule.workspace import Shape
from ringspan.core.step_config import StepConfig

# Another route must save three percent: the model of time is not more accurate than that.
WORTH_IT: Final = 0.97


@dataclass(frozen=True)
class Choice:
    """The route, the modelled forward seconds of each candidate, and why."""

    route: str
    seconds: tuple[tuple[str, float], ...]

    @property
    def reason(self) -> str:
        timed = ", ".join(f"{route} {seconds:.3g} s" for route, seconds in self.seconds)
        return f"route {self.route}: predicted forward time {timed}"


@lru_cache(maxsize=64)
def choose_route(
    layout: Layout,
    mask: Mask,
    shape: Shape,
    speeds: Speeds,
    keys: Layout | None = None,
) -> Choice:
    """Return the route that the model finds quickest; of two rings, fewer bytes unless one is clearly quicker.

    Keys and values that are sent in another form than they are computed in rule out the ring of queries.
    """
    plain, keys = "ring", keys or layout
    if shape.sent_as.is_exact:
        ends = sorted({0, layout.ranks - 1})
        plain = min(
            ("ring", "pass-q"),
            key=lambda route: sent_bytes(layout, keys, mask, route, shape, ends),
        )
    # Custom layouts have no Ulysses groups.
    others = other_routes(layout.ranks, shape, speeds.ranks_per_node)
    if isinstance(layout, CustomLayout) or isinstance(keys, CustomLayout):
        others = (route for route in others if not route.startswith("ulysses"))
    candidates = dict.fromkeys(("ring", plain, *others))
    seconds = {
        route: forward_pass(layout, mask, route, shape, speeds, keys).seconds
        for route in candidates
    }
    best = min(seconds, key=lambda route: seconds[route])
    if seconds[best] > WORTH_IT * seconds[plain]:
        best = plain
    return Choice(best, tuple(seconds.items()))


def cheaper_route(queries: Layout, keys: Layout, mask: Mask, shape: Shape) -> str:
    """Return ``ring`` or ``pass-q``, with fewer bytes for new tokens over a cache."""
    everyone = range(queries.ranks)
    return min(
        ("ring", "pass-q"),
        key=lambda route: sent_bytes(queries, keys, mask, route, shape, everyone),
    )


def other_routes(ranks: int, shape: Shape, ranks_per_node: int) -> Iterator[str]:
    """List candidates except rings (with one link into a rank, ``bidirectional`` gains nothing)."""
    if 1 < ranks_per_node < ranks and ranks % ranks_per_node == 0:
        yield f"double-ring:{ranks_per_node}"
    yield "all-gather"
    for members in range(2, ranks + 1):
        if ranks % members == 0 and splits(shape, members):
            yield f"ulysses:{members}"


def splits(shape: Shape, members: int) -> bool:
    try:
        member_heads(shape.heads, shape.kv_heads, members)
    except UnsupportedError:
        return False
    return True


def check_segments(checkpoint: str, layers_per_checkpoint: int) -> None:
    """Raise ConfigError for empty segments, and for segments without checkpoints."""
    check_whole("layers_per_checkpoint", layers_per_checkpoint)
    if layers_per_checkpoint > 1 and checkpoint == "none":
        raise ConfigError(
            f"layers_per_checkpoint={layers_per_checkpoint}: layers share the input that checkpointing keeps; use "
            "checkpoint='attention' or 'full'"
        )


def num_inputs(layers: int, layers_per_checkpoint: int) -> int:
    """Return the most layer inputs held at once: kept ones, and a segment's recomputed ones."""
    return -(-layers // layers_per_checkpoint) + layers_per_checkpoint - 1


def frugal_segment(layers: int) -> int:
    """Return the smallest ``layers_per_checkpoint`` with the fewest inputs."""
    return min(range(1, layers + 1), key=lambda size: num_inputs(layers, size))


def segment_sizes(layers: int) -> tuple[int, ...]:
    """Return the ``layers_per_checkpoint`` worth weighing: 1, 2 and the most frugal."""
    return tuple(sorted({1, min(2, layers), frugal_segment(layers)}))


def sends_latents(config: StepConfig, route: Route, ring: int, *, has_tp: bool) -> bool:
    """Return whether latents, if they are fewer numbers, travel in place of keys and values expanded from them.

    On a ring without ``folds`` or ``compile``, on a route of keys and values of all heads.
    """
    return (
        ring > 1
        and route.carries_latents
        and not has_tp
        and config.compile is False
        and config.folds == 1
    )
