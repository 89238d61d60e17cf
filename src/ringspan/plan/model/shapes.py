"""Sizes, parameters and windows of a decoder.

L layers, C hidden size, H query heads, G key/value heads, D head size, I intermediate size, V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from ringspan.core.costs import LayerSizes
from ringspan.core.errors import UnsupportedError
from ringspan.plan.model.kinds import LayerKind, Tower


@dataclass(frozen=True, kw_only=True)
class ModelShape(LayerSizes):
    """Sizes of a decoder-only transformer.

    Its layers are equal; or it has ``kinds``, one for each layer, and ``root`` parameters outside of them.

    Of one that sees or hears, ``tower_layers`` are the parameters of each of its towers' layers, ``tower_root`` those
    beside them and the decoder, and ``towers`` what each makes of one sequence. ``later_pairs``: pairs of a query and a
    later key that each layer computes beside the causal ones. ``positions`` are those of a learned table, ``made_for``
    those that a rotary model was made for; 0 if absent or unstated.
    """

    name: str
    layers: int
    vocab: int
    positions: int = 0
    made_for: int = 0
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    model_type: str = "llama"
    kinds: tuple[LayerKind, ...] = ()
    root: int = 0
    towers: tuple[Tower, ...] = ()
    tower_layers: tuple[int, ...] = ()
    tower_root: int = 0
    later_pairs: int = 0

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer that attends; None if it sees everything before it."""
        if self.kinds:
            return tuple(kind.window for kind in self.kinds if kind.attends)
        return self.windows or (None,) * self.layers

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return self.kinds or tuple(
            LayerKind(
                parameters=self.layer_parameters,
                matrices=self.layer_matrix_parameters,
                feedforward=self.feedforward_parameters,
                intermediate=self.intermediate,
                window=window,
            )
            for window in self.layer_windows
        )

    @property
    def has_states(self) -> bool:
        return any(kind.scan or kind.halo for kind in self.kinds)

    @property
    def sees(self) -> bool:
        """True if it has towers."""
        return bool(self.tower_layers)

    @property
    def is_plain(self) -> bool:
        """True if its layers are alike, and it has no tower."""
        return not self.kinds and not self.sees

    @property
    def placed_tokens(self) -> int:
        """Tokens of a sequence that stand for towers' embeddings."""
        return sum(tower.tokens for tower in self.towers)

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of one layer that every token is multiplied with."""
        if self.kinds:
            return max(kind.matrices for kind in self.kinds)
        return self.hidden * (2 * self.query_size + 2 * self.kv_size) + self.feedforward_parameters

    @property
    def feedforward_parameters(self) -> int:
        if self.kinds:
            return max(kind.feedforward for kind in self.kinds)
        return (3 if self.family == "llama" else 2) * self.hidden * self.intermediate

    def split(self, tp: int) -> "ModelShape":
        """Return each tensor-parallel rank's share of heads, feed-forward and, where it divides evenly, vocabulary.

        Raises:
            UnsupportedError: a family without a plan, or sizes that do not divide evenly.
        """
        if tp == 1:
            return self
        if self.family == "gpt2" or not self.is_plain:
            raise UnsupportedError(f"{self.name}: there is no tensor-parallel plan for {self.model_type}; use tp=1")
        sizes = {name: getattr(self, name) for name in ("heads", "kv_heads", "intermediate")}
        for name, size in sizes.items():
            if size % tp:
                raise UnsupportedError(f"{self.name}: tp={tp} does not divide {name}={size}; choose a divisor")
        vocab = self.vocab // tp if self.vocab % tp == 0 else self.vocab
        return replace(self, vocab=vocab, **{name: size // tp for name, size in sizes.items()})

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer, of the largest where they differ."""
        if self.kinds:
            return max(kind.parameters for kind in self.kinds)
        if self.family == "gpt2":
            biases = 3 * self.hidden + self.hidden + self.intermediate + self.hidden
            return self.layer_matrix_parameters + biases + 4 * self.hidden
        biases = self.qkv_bias * (self.query_size + 2 * self.kv_size) + self.output_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return self.layer_matrix_parameters + biases + norms

    @property
    def root_parameters(self) -> int:
        """Parameters outside of the layers: embeddings, the head when it is not tied, the last norm."""
        if self.kinds:
            return self.root
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        return embeddings + (2 if self.family == "gpt2" else 1) * self.hidden + self.tower_root

    @property
    def parameters(self) -> int:
        return self.parameters_of_layers(self.layers) + sum(self.tower_layers) + self.root_parameters

    def parameters_of_layers(self, count: int) -> int:
        """Count the parameters of the last ``count`` layers."""
        if self.kinds:
            return sum(kind.parameters for kind in self.kinds[self.layers - count :])
        return count * self.layer_parameters

    @property
    def matrix_parameters(self) -> int:
        """Weights that every token is multiplied with, the head included: 2 FLOPs each in forward."""
        return sum(kind.matrices for kind in self.layer_kinds) + self.vocab * self.hidden
