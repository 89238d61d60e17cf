"""MPT: attention in its own code, with ALiBi."""

from typing import Any, Final

from torch import Tensor

from ringspan.torch.model.attention.own import InlineAttention
from ringspan.torch.model.layers.family import Family


class _Mpt(InlineAttention):
    """MPT: ALiBi, with interleaved slopes unless heads are a power of two."""

    ring_needs = ("Wqkv", "out_proj", "softmax_scale", "clip_qkv")

    def computed(self: Any, given: dict[str, Any]) -> tuple[Tensor, None]:
        """Return the attention output (B, T, C) and no weights, as ``MptAttention.forward`` does."""
        hidden = given["hidden_states"]
        made = self.Wqkv(hidden)
        if self.clip_qkv:
            made = made.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        shape = *hidden.shape[:2], self.n_heads, self.head_dim
        q, k, v = (x.reshape(shape).transpose(1, 2) for x in made.chunk(3, dim=2))
        # The bias is ``-slope * distance``: its last column but one is at distance 1.
        slopes = -given["position_bias"][:, 0, -2].float()
        out = self.attend(
            q, k, v, self.softmax_scale, self.attn_dropout_p, alibi_slopes=slopes
        )
        return self.out_proj(out.flatten(2)), None


FAMILIES: Final = (
    Family(
        name="MPT",
        types=("mpt",),
        attention={"MptAttention": _Mpt},
        has_alibi=lambda _: True,
        takes_mask=True,
    ),
)
