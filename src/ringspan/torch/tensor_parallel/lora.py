"""LoRA on projections that tensor parallelism splits: ``y = W x + scale B A x``, on P ranks.

Columns: W and B give each rank its share of the outputs; A is whole, and the gradient of A x is summed. Rows: W and A
take each rank's share of the inputs; A x is summed, and B is whole.
"""

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from ringspan.core.errors import UnsupportedError

WHOLE: Final = "whole"  # the style of a module that every rank has all of

_LORA: Final = "peft.tuners.lora"


def with_adapters(styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Replace LoRA adapters in projection styles by their parts; refuse adapters that are more than two matrices."""
    result: dict[str, str] = {}
    for path, style in styles.items():
        module: Any = modules.get(path)
        if style not in ("colwise", "rowwise") or not _is_lora(module):
            result[path] = style
            continue
        if module.lora_variant or len(module.lora_embedding_A):
            names = ", ".join(sorted({type(variant).__name__ for variant in module.lora_variant.values()}))
            raise UnsupportedError(f"{path} has an adapter that tp cannot split ({names}); use plain LoRA, or tp=1")
        result[f"{path}.base_layer"] = style
        for name in module.lora_A:
            result[f"{path}.lora_A.{name}"] = WHOLE if style == "colwise" else style
            result[f"{path}.lora_B.{name}"] = style if style == "colwise" else WHOLE
    return result


def _is_lora(module: object) -> bool:
    return type(module).__module__.startswith(_LORA) and type(module).__name__ == "Linear"
