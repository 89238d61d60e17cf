"""Models of transformers that compute in float64 all through: their own code says float32 in many places."""

import re
import sys
import types
from functools import lru_cache
from typing import Any

from transformers import AutoModel


@lru_cache
def in_float64(kind: type) -> dict[str, Any]:
    """Return what the module of a class has, made again from its source with float64 wherever that says float32.

    An index chooses the first of equal scores.
    """
    module = sys.modules[kind.__module__]
    with open(str(module.__file__), encoding="utf-8") as file:
        source = file.read()
    source = re.sub(
        r"\btorch\.float(32)?\b",
        "torch.float64",
        source.replace(".float()", ".double()"),
    )
    # torch takes any of equal scores, and which one may depend on the length of the row.
    ordered = r"\1.sort(dim=\3, descending=True, stable=True).indices.narrow(\3, 0, \2)"
    source = re.sub(r"(\w*scores)\.topk\((.+), dim=(-?\d)\)\.indices", ordered, source)
    copy = types.ModuleType(module.__name__)
    copy.__package__, copy.__file__ = module.__package__, module.__file__
    # The file is the one that Python has imported already.
    exec(compile(source, str(module.__file__), "exec"), vars(copy))  # noqa: S102
    vars(copy)["AutoModel"] = _Auto
    return vars(copy)


class _Auto:
    """Maker of the models inside of others, in float64 too."""

    @staticmethod
    def from_config(config: Any) -> Any:
        kind: Any = AutoModel._model_mapping[type(config)]
        return in_float64(kind)[kind.__name__](config)


def in_float64_of(model: Any) -> Any:
    """Return a copy of a model, with its weights, that computes in float64."""
    wide = in_float64(type(model))[type(model).__name__](model.config).double()
    wide.load_state_dict(model.state_dict())
    return wide.train(model.training)
