"""Families of models: all that sets some types apart from transformers' conventions, in one record for each.

Most models need none: their configs name windows and heads as transformers does, and their attention goes through its
``AttentionInterface``. ``ringspan.families`` has a file for each family that needs more. A package brings its own by
the entry point group ``ringspan.families``, a script by ``register``.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ringspan.core.errors import ConfigError
from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.core.packages import of_packages
from ringspan.torch.data.media.kind import Kind

if TYPE_CHECKING:
    from ringspan.core.selection import Index as IndexCost
    from ringspan.torch.engine.recurrence.functions import StateFunction

_GROUP: Final = "ringspan.families"
_BUILT_IN: Final = "ringspan.families"

# Function from positions (B, T) to the factors by which queries are scaled.
Factors = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ChosenKeys:
    """Layers whose queries attend to the keys that an index chooses, or to entries that pool them.

    ``layers``: their names in ``config.layer_types``. ``mixin`` is put before the module ``indexer``, and ``parts``
    before modules that also read earlier tokens, by the attribute that identifies them. An index ``pools`` if it
    chooses pools of keys, counted from a row's first real token; ``rotates_last`` if positions turn the last numbers of
    a head and not the first; ``learns`` if ``index_loss`` can train it. ``cost`` counts an attention module's index for
    the planner, given the numbers fetched of each token, and returns None if it does not know the module.
    """

    layers: tuple[str, ...] = (
        "indexed_attention",
        # The names in releases of transformers before 5.22.
        "deepseek_sparse_attention",
        "qwen_sparse_attention",
    )
    mixin: type | None = None
    parts: Mapping[str, type] = field(default_factory=dict)
    pools: bool = False
    rotates_last: bool = False
    learns: bool = False
    cost: "Callable[[Any, int], IndexCost | None]" = lambda _module, _token: None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A group of model types and what sets them apart; what is left out follows transformers' conventions.

    Args:
        name: shown in errors.
        types: values of ``config.model_type`` that it serves: of a language model, or of a model that sees or hears.
        layer_masks: maps the text's config to the mask of each layer.
        attention: for modules that compute attention in their own code, by the name of their class: an
            ``OwnAttention`` that hands queries, keys and values to the ring.
        has_alibi: tells by the config whether attention adds a slope times the distance.
        takes_mask: True if the decoder calls a method of its mask; the ring ignores the mask's values.
        index: layers whose keys an index chooses.
        states: further functions, by name, that carry a state from token to token.
        stateful: classes of modules that compute their state in their own code, by name, and what computes it on spans.
        scales_queries: tells by the config whether queries are scaled by their positions.
        query_scale: returns an attention module's factors by position, or None, and switches its own scaling off, which
            would count local tokens.
        counts_distances: False if more than the distance of two tokens matters to attention.
        kv_heads: the number of key/value heads, if the config names it in its own way.
        no_cache: tells by the config why a model does not generate on a ring; "" if it does.
        keyless_layers: layers that keep no keys of their own in a cache.
        no_tp: why tensor parallelism cannot split its layers.
        media: the images or sound that its models take.
    """

    name: str
    types: tuple[str, ...] = ()
    layer_masks: Callable[[PreTrainedConfig], Sequence[LayerMask]] | None = None
    attention: Mapping[str, type] = field(default_factory=dict)
    has_alibi: Callable[[PreTrainedConfig], bool] = lambda _: False
    takes_mask: bool = False
    index: ChosenKeys | None = None
    states: "Mapping[str, StateFunction]" = field(default_factory=dict)
    stateful: Mapping[str, type] = field(default_factory=dict)
    scales_queries: Callable[[PreTrainedConfig], bool] = lambda _: False
    query_scale: Callable[[nn.Module], Factors | None] | None = None
    counts_distances: bool = True
    kv_heads: Callable[[PreTrainedConfig], int] | None = None
    no_cache: Callable[[PreTrainedConfig], str] = lambda _: ""
    keyless_layers: Callable[[PreTrainedConfig], Iterable[int]] = lambda _: ()
    no_tp: str = ""
    media: Kind | None = None

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Entries of ``config.layer_types`` that the family's models have besides transformers' usual ones."""
        return () if self.index is None else tuple(self.index.layers)

    def has_own_layers(self, config: PreTrainedConfig) -> bool:
        """Return True if a config has layers of the family's ``layer_types``, whose attention it replaces."""
        types = getattr(config, "layer_types", None) or ()
        return any(kind in types for kind in self.layer_types)


CONVENTIONS: Final = Family(name="transformers' conventions")
_registered: Final[dict[str, Family]] = {}


def register(family: Family, *, replace: bool = False) -> Family:
    """Register a family for its model types on this rank: call it on every rank, before ``parallelize``.

    Raises:
        ConfigError: it names no type, or one that another family serves, unless ``replace``.
    """
    if not isinstance(family, Family):
        raise ConfigError(
            f"register takes a ringspan.families.Family, got {type(family).__name__}; make one with Family(name=..., "
            "types=('...',))"
        )
    if not family.types:
        raise ConfigError(
            f"family {family.name!r} serves no model type; give types=('...',), values of config.model_type"
        )
    known = _installed() | _registered
    for kind in family.types:
        if kind in known and known[kind] != family and not replace:
            raise ConfigError(
                f"family {family.name!r}: model type {kind!r} is served by family {known[kind].name!r}; register it "
                "with replace=True to take its place"
            )
    _registered.update(dict.fromkeys(family.types, family))
    return family


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family that serves a config's model type, or transformers' conventions."""
    return families().get(getattr(config, "model_type", ""), CONVENTIONS)


def families() -> dict[str, Family]:
    """Return all families by the model types that they serve."""
    return _installed() | _registered if _registered else _installed()


@cache
def _installed() -> dict[str, Family]:
    """Return the families of this package and of others that are installed."""
    found: dict[str, Family] = {}
    for family in (*_built_in(), *_of_packages()):
        found |= dict.fromkeys(family.types, family)
    return found


def _built_in() -> Iterator[Family]:
    # The modules are imported by name, so that nothing in this file depends on a family.
    package = importlib.import_module(_BUILT_IN)
    for module in pkgutil.iter_modules(package.__path__):
        yield from importlib.import_module(f"{_BUILT_IN}.{module.name}").FAMILIES


def _of_packages() -> Iterator[Family]:
    found: Any = of_packages(_GROUP, lambda each: isinstance(each, Family), "Family")
    return found
