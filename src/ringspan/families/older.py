"""Models of 512 to 2,048 learned positions with attention in their own code: GPT-1, BERTs, MVP, TrOCR and XGLM."""

from typing import Any, Final

from torch import Tensor

from ringspan.torch.model.attention.own import InlineAttention, OwnAttention
from ringspan.torch.model.layers.family import Family


class _TransposedKeys(OwnAttention):
    """GPT-1: keys come as (B, H, D, T)."""

    ring_needs = ("_attn", "c_attn", "scale", "split_heads")

    def _attn(self: Any, q: Tensor, k: Tensor, v: Tensor, *_: object) -> list[Tensor]:
        scaling = v.shape[-1] ** -0.5 if self.scale else 1.0
        out = self.attend(q, k.transpose(2, 3), v, scaling, self.attn_dropout.p)
        return [out.transpose(1, 2)]


class _Bert(InlineAttention):
    """Megatron-BERT and RemBERT."""

    ring_needs = ("query", "key", "value", "attention_head_size", "dropout")

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        size = self.attention_head_size
        q, k, v = self.projected(given, (self.query, self.key, self.value), size)
        return self.attend(q, k, v, size**-0.5, self.dropout.p).flatten(2), None


class _Bart(InlineAttention):
    """MVP, TrOCR and XGLM."""

    ring_needs = ("q_proj", "k_proj", "v_proj", "out_proj", "scaling")

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = self.projected(given, layers, self.head_dim)
        out = self.attend(q, k, v, self.scaling, self.dropout).flatten(2)
        return self.out_proj(out), None


FAMILIES: Final = (
    Family(
        name="GPT-1", types=("openai-gpt",), attention={"Attention": _TransposedKeys}
    ),
    Family(
        name="Megatron-BERT",
        types=("megatron-bert",),
        attention={"MegatronBertSelfAttention": _Bert},
    ),
    Family(
        name="RemBERT",
        types=("rembert",),
        attention={"RemBertSelfAttention": _Bert},
    ),
    Family(name="MVP", types=("mvp",), attention={"MvpAttention": _Bart}),
    Family(name="TrOCR", types=("trocr",), attention={"TrOCRAttention": _Bart}),
    Family(name="XGLM", types=("xglm",), attention={"XGLMAttention": _Bart}),
)
