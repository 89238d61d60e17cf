"""Every argument of transformers' language models (tested by signature), and its treatment on a ring; others raise."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from ringspan.core.errors import UnsupportedError

T = TypeVar("T")

_TABLE: Final = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
HONOURED: Final = frozenset[str](_TABLE["honoured"].split())
FIXED: Final[Mapping[str, Any]] = _TABLE["fixed"]
REFUSED: Final[Mapping[str, str]] = {
    name: group["remedy"]
    for group in _TABLE["refused"]
    for name in group["names"].split()
}


@torch.compiler.disable()
def check_arguments(model_name: str, arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for the first argument that a ring does not support or no model has."""
    for name, value in arguments.items():
        if name in REFUSED:
            if value is not None:
                raise UnsupportedError(
                    f"{name} is not supported on a ring; {REFUSED[name]}"
                )
        elif name in FIXED:
            if value is not None and (
                isinstance(value, Tensor) or value != FIXED[name]
            ):
                shown = (
                    f"a {type(value).__name__}" if isinstance(value, Tensor) else value
                )
                raise UnsupportedError(
                    f"{name}={shown} is not supported on a ring; it must be {FIXED[name]}"
                )
        else:
            raise UnsupportedError(
                f"{model_name}.forward does not take {name!r}{_similar(name, [*HONOURED, *FIXED])}; leave it out"
            )


def _similar(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


class Unsaid(Enum):
    UNSAID = "unsaid"


UNSAID: Final = Unsaid.UNSAID

# Arguments of attention that the registered function computes with.
COMPUTED: Final = frozenset(
    {"alibi_slopes", "ring_packed", "s_aux", "scaling", "sliding_window", "softcap"}
)


_ANY: Final = ()


def _all(value: T, names: str) -> dict[str, T]:
    return dict.fromkeys(names.split(), value)


# Other arguments that models pass to transformers' attention interface, and the values accepted for each; () is any.
ATTENTION: Final[Mapping[str, tuple[Any, ...]]] = {
    # Attention functions do not use these: they are inputs of earlier layers, or select what is returned.
    **_all(_ANY, "input_ids position_embeddings position_ids"),
    "output_router_logits": _ANY,
    **_all((False, None), "use_cache output_attentions output_hidden_states"),
    **_all(
        (None,), "labels encoder_hidden_states past_key_values cache cache_position"
    ),
    # It concerns flash attention's backward pass; the ring always sums in the same order.
    "deterministic": _ANY,
    # These change which keys a query sees, or its scores.
    "is_causal": (True, None),
    **_all(
        (None,),
        "attention_mask block_indices cu_seq_lens_k cu_seq_lens_q head_mask indices max_length_k max_length_q "
        "position_bias seq_idx sinks",
    ),
    "dropout": (0, None),
}


def check_attention(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a layer's first argument that asks for other attention than the ring's."""
    kind = type(module).__name__
    # BigBird-Pegasus' decoder says is_causal=False although its mask makes it causal.
    if getattr(module, "is_causal", True) is False and not getattr(
        module, "is_decoder", False
    ):
        raise UnsupportedError(
            f"{kind} has is_causal=False: its tokens see later ones, which a ring does not support"
        )
    for name, value in arguments.items():
        known = ATTENTION.get(name)
        if known is None:
            raise UnsupportedError(
                f"{kind} gives attention {name}, which the ring does not know; leave it out"
            )
        if known and (isinstance(value, Tensor) or value not in known):
            shown = "" if isinstance(value, Tensor) else f"={value}"
            raise UnsupportedError(
                f"{kind} asks for {name}{shown}, which the ring does not support yet; unset it"
            )
