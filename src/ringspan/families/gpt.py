"""GPT-J, CodeGen, GPT-Neo and GPT-NeoX Japanese: a method of the layer computes products and softmax."""

from typing import Any, Final

from torch import Tensor

from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.torch.model.attention.own import OwnAttention
from ringspan.torch.model.layers.family import Family


class _Method(OwnAttention):
    """GPT-J, CodeGen, GPT-Neo, GPT-NeoX Japanese: a method of its own computes products and softmax."""

    ring_needs = ("_attn",)

    def _attn(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
    ) -> tuple[Tensor, None]:
        """Return attention (B, H, T, D) over the ring in place of the module's products and softmax, and no weights.

        The four models name their scale and dropout differently; only GPT-Neo has ``attention_type``.
        """
        divisor = getattr(self, "scale_attn", None) or getattr(self, "norm_factor", 1.0)
        dropout = getattr(self, "attn_dropout", None) or self.attention_dropout
        options: dict[str, Any] = {}
        if getattr(self, "attention_type", None) is not None:
            options["sliding_window"] = (
                self.config.window_size if self.attention_type == "local" else None
            )
        query, key = query.to(value.dtype), key.to(value.dtype)
        return self.attend(
            query, key, value, 1 / divisor, dropout.p, **options
        ).transpose(1, 2), None


def _neo_masks(config: Any) -> list[LayerMask]:
    window = config.window_size
    return [
        LayerMask(window=window if kind == "local" else None)
        for kind in config.attention_layers
    ]


FAMILIES: Final = (
    Family(name="GPT-J", types=("gptj",), attention={"GPTJAttention": _Method}),
    Family(name="CodeGen", types=("codegen",), attention={"CodeGenAttention": _Method}),
    Family(
        name="GPT-Neo",
        types=("gpt_neo",),
        attention={"GPTNeoSelfAttention": _Method},
        layer_masks=_neo_masks,
    ),
    Family(
        name="GPT-NeoX Japanese",
        types=("gpt_neox_japanese",),
        attention={"GPTNeoXJapaneseAttention": _Method},
    ),
)
