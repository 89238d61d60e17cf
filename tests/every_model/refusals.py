"""What docs/models.md says of the types that raise: why, in words for who reads the page, and what it would take."""

from typing import Final, NamedTuple


class Refusal(NamedTuple):
    """A reason as the page has it, for messages that contain a piece of text."""

    piece: str
    why: str
    needed: str


_KERNELS: Final = "in ringspan's kernels"
REFUSALS: Final = (
    Refusal(
        "has a loss of its own",
        "The model's loss is another one than the cross-entropy of the next token.",
        "that loss over all ranks, in ringspan",
    ),
    Refusal(
        "in its own code",
        "Attention is the model's own code, which a ring cannot take over.",
        "attention through transformers' AttentionInterface, in transformers",
    ),
    Refusal(
        "numbers its tokens itself",
        "The decoder takes no `position_ids`: each rank would number its tokens from 0.",
        "`position_ids` in the decoder's forward pass, in transformers",
    ),
    Refusal(
        "needs more than tokens",
        "The decoder takes more than tokens with each text, such as an image.",
        "a decoder that runs on text alone, in transformers",
    ),
    Refusal(
        "does more with its decoder's hidden states",
        "It has no head of its own: a whole language model is inside.",
        "its decoder and its head as parts of it, in transformers",
    ),
    Refusal(
        "reference_sliding_attention",
        "Queries see the tokens of the image and a window.",
        "that mask over the ring, in ringspan",
    ),
    Refusal(
        "indexed_attention",
        "Each query attends to some keys, which an index chooses among all before it.",
        "that choice over the keys of all ranks, in ringspan",
    ),
    Refusal(
        "compressed_sparse_attention",
        "Queries attend to compressed blocks of keys, some of which they choose.",
        "compressing and choosing over the keys of all ranks, in ringspan",
    ),
    Refusal(
        "minimax_m3_sparse",
        "Each query attends to some blocks of keys, which an index chooses among all before it.",
        "that choice over the keys of all ranks, in ringspan",
    ),
    Refusal(
        "is a convolution that its module computes itself",
        "Convolutions over neighbouring tokens are its modules' own code, which a ring cannot take over.",
        "convolutions by `causal_conv1d_fn`, in transformers",
    ),
    Refusal(
        "layers with a state or a convolution, of which",
        "Layers carry a state from token to token in their own code, which a ring cannot take over.",
        "a function of the module that computes it, in transformers",
    ),
    Refusal(
        "is a weight of",
        "Weights are shared by several layers, or by a layer and one inside of it.",
        "gathering such weights once for all of these layers, in ringspan",
    ),
    Refusal(
        "has no attention heads",
        "It has no attention: a state goes from token to token, in its own code.",
        "a function of the module that computes it, in transformers",
    ),
    Refusal(
        "more between its decoder and its logits",
        "Layers come between the decoder and the head, which the blockwise loss leaves out.",
        "a blockwise loss that runs these layers too, in ringspan",
    ),
    Refusal(
        "more than its decoder's last hidden states",
        "Its logits are made of more than the decoder's last hidden states, such as an image that each text has.",
        "a blockwise loss that runs these layers too, in ringspan",
    ),
    Refusal(
        "asks for attention_mask", "Attention has a mask that the layer computes of its keys.", f"such masks {_KERNELS}"
    ),
    Refusal(
        "asks for position_bias",
        "Attention adds a bias to its scores that the layer computes.",
        f"such biases {_KERNELS}",
    ),
    Refusal(
        "no language model of layers",
        "It is no model of text alone, and has no decoder of the usual kind.",
        "its decoder as a model of its own, in transformers",
    ),
    Refusal(
        "is an encoder-decoder model",
        "It has an encoder.",
        "a ring for the encoder's tokens in addition to the decoder's, in ringspan",
    ),
    Refusal(
        "tokens see later ones",
        "Its tokens see later ones: it is an encoder.",
        "nothing: it is no causal language model",
    ),
    Refusal(
        "bidirectional attention",
        "Its usual config lets tokens of an image see later ones.",
        "`use_bidirectional_attention=None` in the config, for text alone",
    ),
    Refusal(
        "is not a causal language model with a head",
        "It has no decoder of its own below a head.",
        "its decoder as a model of its own, in transformers",
    ),
)


def refusal_of(message: str) -> Refusal:
    """What the page says for an error.

    Raises:
        LookupError: nothing; the page must not have a message for programmers.
    """
    found = next((refusal for refusal in REFUSALS if refusal.piece in message), None)
    if found is None:
        raise LookupError(f"docs/models.md has no words for: {message}")
    return found
