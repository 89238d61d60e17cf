"""The tables of what forward passes and attention can be asked for, against the signatures of transformers."""

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import TransformersKwargs

from ringspan.torch.model.forward_arguments import (
    ATTENTION,
    COMPUTED,
    FIXED,
    HONOURED,
    REFUSED,
)
from ringspan.torch.model.tasks.causal_lm import RingCausalLM
from tests.every_model.tiny import KINDS, MULTIMODAL, auto_class

VARIADIC = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL


def classes(names: Any) -> Iterator[type]:
    """The classes of one entry of transformers' mappings."""
    for name in names if isinstance(names, tuple | list) else (names,):
        yield getattr(transformers, name)


def parameters(function: Any) -> set[str]:
    return {
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind not in VARIADIC
    } - {"self"}


def interface_keywords(source: str) -> Iterator[str]:
    lines = source.splitlines()
    for number, line in enumerate(lines):
        if not line.rstrip().endswith(("attention_interface(", "attention_fn(")):
            continue
        call, depth = ["f("], 1
        for following in lines[number + 1 :]:
            call.append(following)
            depth += following.count("(") - following.count(")")
            if depth == 0:
                break
        nodes = ast.walk(ast.parse("\n".join(line.strip() for line in call)))
        yield from (
            each.arg
            for node in nodes
            if isinstance(node, ast.Call)
            for each in node.keywords
            if each.arg
        )


def test_each_forward_argument_is_honoured_fixed_or_refused():
    known = HONOURED | FIXED.keys() | REFUSED.keys()
    for kind in KINDS:
        names = auto_class(kind)._model_mapping._model_mapping[
            kind := kind.removesuffix(MULTIMODAL)
        ]
        for each in (*classes(names), *classes(MODEL_MAPPING_NAMES.get(kind, ()))):
            forward: Any = getattr(each, "forward")  # noqa: B009  # not every class says it has one
            assert parameters(forward) <= known, f"{kind}: {each.__name__}"
    assert TransformersKwargs.__annotations__.keys() <= known


def test_no_argument_has_two_treatments():
    assert (
        not HONOURED & (FIXED.keys() | REFUSED.keys())
        and not FIXED.keys() & REFUSED.keys()
    )
    # The columns of a data set that transformers' Trainer keeps are parameters: these two are refused, not dropped.
    columns = {"labels", "attention_mask"}
    assert parameters(RingCausalLM.forward) - HONOURED == columns <= REFUSED.keys()
    assert parameters(RingCausalLM.forward) >= HONOURED


def test_each_argument_of_attention_is_used_or_fixed():
    known = ATTENTION.keys() | COMPUTED
    found: set[str] = set()
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for each in classes(names):
            keywords = set(
                interface_keywords(inspect.getsource(sys.modules[each.__module__]))
            )
            assert keywords <= known, kind
            found |= keywords
    assert {
        "scaling",
        "dropout",
        "sliding_window",
        "s_aux",
        "softcap",
        "position_bias",
    } <= found
    # Decoders hand on what their own forward pass was given beside its parameters.
    assert TransformersKwargs.__annotations__.keys() <= known | {"num_items_in_batch"}
