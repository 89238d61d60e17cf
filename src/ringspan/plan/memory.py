"""Bytes that one rank holds in a training step, by formula: what ``dryrun`` traces, in microseconds.

The step is ours: FSDP2 over the ring, AdamW, checkpointed layers, the blockwise loss. A step has a few moments that can
be the highest; each is written out below, and tests hold them against the trace.

T tokens of this rank (all sequences of a micro-step), C hidden size, I intermediate size, H, G heads, D head size, V
vocabulary, N ranks of the ring.
"""

from dataclasses import dataclass
from typing import Final

from ringspan.core.errors import ConfigError
from ringspan.core.layout import Layout, LayoutName
from ringspan.plan.shapes import ModelShape

CHECKPOINTS: Final = ("none", "attention", "full")  # from the fastest to the most frugal
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
CATEGORIES: Final = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication")

_FLOAT32: Final = 4
_LOSS_ROWS: Final = 4096  # rows of the head whose gradient the loss multiplies at once
_FEEDFORWARD_TOKENS: Final = 4096  # that a checkpointed layer's feed-forward works on at once
_INDICES: Final = 3 * 8  # tokens, positions and labels are int64


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training step: its length, how it is split, and what it computes and keeps in.

    ``batch`` is the number of sequences of a rank's micro-step; ``dtype`` what layers compute in, ``parameter_dtype``
    what parameters, gradients and moments are kept in. ``on_gpu`` is what a GPU does where it differs from a CPU: heads
    of attention in one group, and the optimizer on all parameters at once.
    """

    length: int
    ring: int = 1
    replicate: int = 1
    batch: int = 1
    layout: LayoutName = "zigzag"
    route: str = "ring"
    checkpoint: str = "attention"
    dtype: str = "bfloat16"
    parameter_dtype: str = "float32"
    loss_chunk_tokens: int = 1024
    on_gpu: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of one rank in one micro-step."""
        return self.batch * Layout(self.layout, self.length, self.ring).tokens_per_rank

    @property
    def number_bytes(self) -> int:
        return dtype_bytes(self.dtype)

    @property
    def parameter_bytes(self) -> int:
        return dtype_bytes(self.parameter_dtype)


def dtype_bytes(name: str) -> int:
    """Bytes of a number.

    Raises:
        ConfigError: a dtype that training does not compute in.
    """
    if name not in DTYPE_BYTES:
        raise ConfigError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


@dataclass(frozen=True)
class Memory:
    """The highest moment of a step: its name and bytes per category."""

    moment: str
    bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes.values())


def training_memory(shape: ModelShape, setting: Setting) -> Memory:
    """What a rank holds at the highest moment of a training step, once the optimizer has its state."""
    if setting.checkpoint not in CHECKPOINTS:
        raise ConfigError(f"unknown checkpoint policy {setting.checkpoint!r}; choose one of {', '.join(CHECKPOINTS)}")
    step = _Step(shape, setting)
    moments = (step.loss(), step.loss_gradient(), *step.layers(), step.embedding(), step.update())
    return max(moments, key=lambda memory: memory.peak_bytes)


def saved_per_token(shape: ModelShape, checkpoint: str, number_bytes: int) -> int:
    """Bytes a token that one layer keeps from its forward to its backward pass.

    ``full`` keeps the layer's input; ``attention`` also the ring's result and its float32 log-sum-exp.
    """
    if checkpoint == "none":
        return sum(_layer_parts(shape, number_bytes).values())
    kept = number_bytes * shape.hidden
    if checkpoint == "attention":
        kept += number_bytes * shape.query_size + _FLOAT32 * shape.heads
    return kept


def _norm(size: int, number_bytes: int, family: str = "llama") -> int:
    """What a norm over ``size`` numbers saves, its result for the next product included.

    An RMS norm of transformers computes in float32: below that it keeps a float32 copy of its input.
    """
    if family == "gpt2":
        return 2 * number_bytes * size + 2 * _FLOAT32
    return _FLOAT32 * size + _FLOAT32 + 2 * number_bytes * size


def _layer_parts(shape: ModelShape, a: int) -> dict[str, int]:
    """Bytes a token of all that a layer saves without checkpointing, in the order in which it is made."""
    heads = a * (shape.query_size + 2 * shape.kv_size)
    if shape.qk_norm:  # the inputs in float32 and normed; the results are what rotates, which keeps nothing
        heads += (_FLOAT32 + a) * (shape.query_size + shape.kv_size) + _FLOAT32 * (shape.heads + shape.kv_heads)
    return {
        "norm": _norm(shape.hidden, a, shape.family),
        "heads": heads,
        "attention": a * shape.query_size + _FLOAT32 * shape.heads,
        "feedforward_norm": _norm(shape.hidden, a, shape.family),
        # gate, up, its activation and their product; the plain one's GELU is five operators that keep their inputs
        "feedforward": (4 if shape.family == "llama" else 6) * a * shape.intermediate,
    }


class _Step:
    """The moments of one step."""

    def __init__(self, shape: ModelShape, setting: Setting) -> None:
        self.shape, self.setting = shape, setting
        self.a, self.p = setting.number_bytes, setting.parameter_bytes
        self.tokens, self.ranks = setting.tokens, setting.ring
        self.layer, self.root = shape.layer_parameters, shape.root_parameters
        self.parameters = self.p * shape.parameters // self.ranks
        self.saved = self.tokens * saved_per_token(shape, setting.checkpoint, self.a)
        rotary = 2 * self.a * shape.head_dim if shape.family == "llama" else 0
        self.inputs = self.tokens * (_INDICES + rotary)
        self.head = shape.vocab * shape.hidden
        self.gathered = self.a * self.root  # the root's parameters stay whole from the first layer to the last gradient

    def memory(
        self, moment: str, *, activations: int = 0, temporaries: int = 0, communication: int = 0, gradients: int = 0
    ) -> Memory:
        return Memory(
            moment,
            {
                "parameters": self.parameters,
                "gradients": gradients,
                "optimizer": 2 * self.parameters,
                "activations": activations + self.inputs,
                "temporaries": temporaries,
                "communication": communication,
            },
        )

    @property
    def _last_norm(self) -> int:
        """The last layer's result and what the final norm keeps of it."""
        a, hidden = self.a, self.shape.hidden
        own_copy = a if self.shape.family == "llama" and a < _FLOAT32 else 0
        return self.tokens * (own_copy * hidden + _norm(hidden, a, self.shape.family))

    def loss(self) -> Memory:
        """While the loss computes the gradients of a chunk of logits: ``ringspan.torch.loss.loss_bytes``."""
        a, chunk = self.a, min(self.setting.loss_chunk_tokens, self.tokens)
        logits = chunk * self.shape.vocab
        chunk_bytes = _FLOAT32 * logits
        if a < _FLOAT32:
            chunk_bytes += a * logits + min(_LOSS_ROWS, self.shape.vocab) * self.shape.hidden * (a + _FLOAT32)
        return self.memory(
            "loss",
            activations=self.shape.layers * self.saved + self._last_norm,
            temporaries=chunk_bytes + _FLOAT32 * self.head + self.tokens * a * self.shape.hidden,
            communication=self.gathered + self.a * self.layer,
        )

    def loss_gradient(self) -> Memory:
        """When backward scales the head's float32 gradient where it is and turns it into the parameters' dtype."""
        own = self.a if self.a < _FLOAT32 else 0
        return self.memory(
            "loss backward",
            activations=self.shape.layers * self.saved + self._last_norm,
            temporaries=(_FLOAT32 + own) * self.head + self.tokens * self.a * self.shape.hidden,
            communication=self.gathered + self.a * self.layer,
        )

    def layers(self) -> list[Memory]:
        """In the backward pass of the last layer, of the one before, and of the first."""
        layers = self.shape.layers
        done = sorted({0, min(1, layers - 1), layers - 1})
        return [moment for number in done for moment in (self._feedforward(number), self._attention(number))]

    def _backward(self, moment: str, done: int, activations: int, temporaries: int, communication: int = 0) -> Memory:
        """A moment in the backward pass of a layer when ``done`` later ones are finished."""
        layers = self.shape.layers
        reducing = _FLOAT32 * self.layer if done else 0  # the last one's gradients, on their way in float32
        prefetched = self.a * self.layer if done + 1 < layers else 0
        d_hidden = self.tokens * self.a * self.shape.hidden
        return self.memory(
            moment,
            activations=(layers - 1 - done) * self.saved + activations,
            temporaries=self.a * self.head + d_hidden + temporaries,
            communication=self.gathered + self.a * self.layer + prefetched + reducing + communication,
            gradients=done * self.p * self.layer // self.ranks,
        )

    @property
    def _made_again(self) -> dict[str, int]:
        """What a layer holds when its backward pass begins: kept, or computed again."""
        parts = {name: self.tokens * size for name, size in _layer_parts(self.shape, self.a).items()}
        if self.setting.checkpoint != "none":
            parts["input"] = self.tokens * self.a * self.shape.hidden if self.a < _FLOAT32 else 0
        return parts

    def _feedforward(self, done: int) -> Memory:
        """At the product's gradient: the product is gone, three more of its size are there.

        Under a checkpoint a block of tokens has them at a time, and the weights' gradients add up in float32.
        """
        made, a, shape = self._made_again, self.a, self.shape
        weight = a * shape.hidden * shape.intermediate
        if self.setting.checkpoint == "none":
            wide = self.tokens * a * shape.intermediate
            return self._backward("feed-forward backward", done, sum(made.values()), 2 * wide + weight)
        block = min(_FEEDFORWARD_TOKENS, self.tokens)
        inside = block * made.pop("feedforward") // self.tokens
        weights = (3 if shape.family == "llama" else 2) * weight
        sums = _FLOAT32 * weights // a if block < self.tokens else 0
        product = sums + inside + 2 * block * a * shape.intermediate + weight
        last = sums + weights if block < self.tokens or a == _FLOAT32 else (_FLOAT32 // a + 1) * weights
        d_hidden = self.tokens * a * shape.hidden
        return self._backward("feed-forward backward", done, sum(made.values()), d_hidden + max(product, last))

    def _attention(self, done: int) -> Memory:
        """In the ring's backward pass: its inputs, results and what the loop holds."""
        made, a = self._made_again, self.a
        kept = sum(made.get(name, 0) for name in ("input", "norm", "heads", "attention"))
        heads = self.tokens * a * (2 * self.shape.query_size + 2 * self.shape.kv_size)  # dout, dq, dk, dv
        weights = a * (self.layer - self.shape.hidden * (self.shape.query_size + 2 * self.shape.kv_size))
        sums, travelling = ring_backward_bytes(self.shape, self.tokens, a, self.ranks)
        return self._backward("attention backward", done, kept, heads + weights + sums, travelling)

    def embedding(self) -> Memory:
        """When the root's gradients are reduced, after all layers."""
        reducing = _FLOAT32 * self.root + _FLOAT32 * self.root // self.ranks
        return self.memory(
            "embedding backward",
            temporaries=self.a * self.root,
            communication=self.gathered + reducing,
            gradients=self.p * (self.shape.parameters - self.root) // self.ranks,
        )

    def update(self) -> Memory:
        """In AdamW, which on a GPU takes the roots of all second moments at once."""
        roots = self.parameters if self.setting.on_gpu else 0
        return self.memory("optimizer", temporaries=roots, gradients=self.parameters)


def ring_backward_bytes(shape: ModelShape, tokens: int, number_bytes: int, ranks: int) -> tuple[int, int]:
    """What the loop of ``torch/ring.py`` holds in backward with all heads at once: (sums and tiles, blocks on the way).

    The float32 sums of dq, dk and dv (in place when the results are float32); dq, dk and dv of a tile and of the one
    before; two blocks of keys and values, and three of their float32 gradients: this hop's, the one that arrives and
    the one that leaves. Two ranks exchange one of each. A layout's smaller tiles and cut blocks come to within 15%.
    """
    queries, keys = tokens * shape.query_size, tokens * 2 * shape.kv_size
    sums = 0 if number_bytes == _FLOAT32 else _FLOAT32 * (queries + keys)
    tile = number_bytes * (queries + keys)
    if ranks == 1:
        return sums + tile, 0
    blocks, gradients = (2, 3) if ranks > 2 else (1, 1)
    return sums + 2 * tile, blocks * number_bytes * keys + gradients * _FLOAT32 * keys


def longest(shape: ModelShape, setting: Setting, budget_bytes: int) -> int:
    """The most tokens of one sequence for which a step fits the budget; 0 when nothing does.

    A multiple of the layout's granularity; ``setting.length`` is ignored.
    """

    def fits(tokens_per_rank: int) -> bool:
        tried = Setting(**{**setting.__dict__, "length": tokens_per_rank * setting.ring})
        return training_memory(shape, tried).peak_bytes <= budget_bytes

    step = 2 if setting.layout == "zigzag" else 1
    low, high = 0, 1
    while fits(high * step):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step * setting.ring
