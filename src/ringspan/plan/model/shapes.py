"""Sizes, parameters and windows of a decoder. C hidden size, D head size, V vocabulary."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.core.mechanisms import CHOSEN_KEYS, MEDIA, STATES
from ringspan.plan.model.kinds import Kept, LayerKind, Tower

# Bytes per weight, scales included. int8: a float32 scale per row of about 4096. int4: a scale and a zero point of 16
# bits per 128 weights. nf4: a float32 scale per 64. nf4-double: 8 bits per 64, and a float32 scale per 256 of those.
PACKED_BYTES: Final = {
    "": 0.0, "int8": 1 + 4 / 4096, "int4": 0.5 + 4 / 128, "nf4": 0.5 + 4 / 64,
    "nf4-double": 0.5 + (1 + 4 / 256) / 64,
}  # fmt: skip

_NONE = LayerKind(
    parameters=0,
    matrices=0,
    feedforward=0,
    intermediate=0,
    heads=1,
    kv_heads=1,
    head_dim=1,
    value_dim=1,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """A decoder's ``kinds``, one per layer, and ``root`` parameters outside of them and of towers' layers.

    ``tower_layers``: parameters of each tower's layer; ``tower_root``: the towers' in ``root``; ``towers``: what each
    makes of a sequence; ``later_pairs``: each layer's pairs of a query and a later key. ``positions``: of a learned
    table, ``made_for``: of a rotary model, 0 if neither. ``unsplit``: why tensor parallelism cannot split it.
    ``config``: config.json. ``outside``: weights of the root that a token is multiplied with, except the head, and
    ``around``: what is kept there, as rotary tables, and of the last norm.
    ``lora``: rank of the trained adapters, 0 if all weights are trained; ``weights``: how the others are packed.
    """

    name: str
    hidden: int
    vocab: int
    kinds: tuple[LayerKind, ...]
    root: int
    outside: int = 0
    tied: bool = False
    around: tuple[Kept, Kept] = (Kept(), Kept())
    positions: int = 0
    made_for: int = 0
    model_type: str = "llama"
    unsplit: str = ""
    config: str = ""
    sees: bool = False
    towers: tuple[Tower, ...] = ()
    tower_layers: tuple[int, ...] = ()
    tower_root: int = 0
    later_pairs: int = 0
    lora: int = 0
    weights: str = ""

    def adapted(self, rank: int, weights: str = "") -> "ModelShape":
        """Return the model frozen, packed as ``weights`` says, with adapters; UnsupportedError for towers."""
        if self.sees:
            raise UnsupportedError(
                f"{self.name}: --lora plans models of text, not {self.model_type} with its towers"
            )
        made = {
            kind: kind.adapted(rank, is_packed=bool(weights)) for kind in {*self.kinds}
        }
        unsplit = "packed weights are not split; use tp=1" if weights else self.unsplit
        kinds = tuple(made[kind] for kind in self.kinds)
        return replace(self, kinds=kinds, lora=rank, weights=weights, unsplit=unsplit)

    def bytes_of(self, parameters: int, packed: int, number_bytes: int) -> int:
        """Return the bytes of parameters, ``packed`` ones packed and the others with ``number_bytes`` each."""
        return number_bytes * (parameters - packed) + round(
            PACKED_BYTES[self.weights] * packed
        )

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def layer_masks(self) -> tuple[LayerMask, ...]:
        """The mask of each layer that attends."""
        return tuple(kind.mask for kind in self.kinds if kind.attends)

    @cached_property
    def attention(self) -> LayerKind:
        """The layer with the most numbers in queries and keys."""
        attending = (kind for kind in self.kinds if kind.attends)
        return max(
            attending,
            key=lambda kind: (
                kind.heads * kind.head_dim,
                kind.kv_heads * kind.head_dim,
            ),
            default=_NONE,
        )

    @cached_property
    def intermediate(self) -> int:
        return max(kind.intermediate for kind in self.kinds)

    @property
    def has_rms(self) -> bool:
        """True if the last norm keeps a float32 copy of its input."""
        return self.around[1].copies > self.hidden

    @property
    def has_states(self) -> bool:
        return any(kind.scan or kind.halo for kind in self.kinds)

    @property
    def mechanisms(self) -> dict[str, str]:
        """Mechanisms of its layers and towers, by their names in ``core.mechanisms``, in words for errors."""
        words = {
            CHOSEN_KEYS: "layers with an index that chooses keys"
            if self.takes_keys_from_all
            else "",
            STATES: "layers with a state or a convolution" if self.has_states else "",
            MEDIA: "towers that see or hear" if self.sees else "",
        }
        return {name: text for name, text in words.items() if text}

    @property
    def takes_keys_from_all(self) -> bool:
        """True if keys come straight from all ranks, whatever the route, and as they are computed."""
        return any(kind.index for kind in self.kinds)

    @cached_property
    def streams(self) -> int:
        return max(kind.streams for kind in self.kinds)

    @property
    def placed_tokens(self) -> int:
        """Tokens of a sequence that stand for towers' embeddings."""
        return sum(tower.tokens for tower in self.towers)

    def split(self, tp: int) -> "ModelShape":
        """Return a tensor-parallel rank's share of heads, feed-forward and, if even, vocabulary; or raise."""
        if tp == 1:
            return self
        if tp not in self._shares:
            self._shares[tp] = self._share(tp)
        return self._shares[tp]

    def can_split(self, tp: int) -> bool:
        try:
            self.split(tp)
        except UnsupportedError:
            return False
        return True

    @cached_property
    def _shares(self) -> dict[int, "ModelShape"]:
        return {}

    def _share(self, tp: int) -> "ModelShape":
        """Return ``split``'s share for one number of ranks; UnsupportedError if a size does not divide."""
        if self.unsplit:
            raise UnsupportedError(f"{self.name}: {self.unsplit}")
        for kind in {*self.kinds}:
            for name in ("heads", "kv_heads", "intermediate"):
                if getattr(kind, name) % tp:
                    size = getattr(kind, name)
                    raise UnsupportedError(
                        f"{self.name}: tp={tp} does not divide {name}={size}; choose a divisor"
                    )
        shares = {kind: kind.share(tp) for kind in {*self.kinds}}
        vocab = self.vocab // tp if self.vocab % tp == 0 else self.vocab
        gone = (self.vocab - vocab) * self.hidden * (1 if self.tied else 2)
        return replace(
            self,
            vocab=vocab,
            root=self.root - gone,
            kinds=tuple(shares[kind] for kind in self.kinds),
        )

    def counted(self, layers: int) -> dict[LayerKind, int]:
        if layers not in self._counts:
            self._counts[layers] = Counter(self.kinds[:layers])
        return self._counts[layers]

    @cached_property
    def _counts(self) -> dict[int, dict[LayerKind, int]]:
        return {}

    @cached_property
    def layer_parameters(self) -> int:
        return max(kind.parameters for kind in self.kinds)

    @property
    def parameters(self) -> int:
        in_layers = sum(
            kind.parameters * count for kind, count in self.counted(self.layers).items()
        )
        return in_layers + sum(self.tower_layers) + self.root

    @property
    def trained_root(self) -> int:
        return 0 if self.lora else self.root

    @property
    def trained(self) -> int:
        return (
            self.trained_of_layers(self.layers)
            + sum(self.tower_layers)
            + self.trained_root
        )

    def trained_of_layers(self, count: int) -> int:
        counts, before = self.counted(self.layers), self.counted(self.layers - count)
        return sum(
            kind.trained * (number - before.get(kind, 0))
            for kind, number in counts.items()
        )

    @property
    def matrix_parameters(self) -> int:
        """Weights that every token is multiplied with, head included: 2 FLOPs each in forward."""
        in_layers = sum(
            kind.matrices * count for kind, count in self.counted(self.layers).items()
        )
        return in_layers + self.outside + self.vocab * self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses: all except the experts that it is not sent to."""
        return self.parameters - sum(
            kind.idle * count for kind, count in self.counted(self.layers).items()
        )
