"""Two training steps, an evaluation and a generation, by plain transformers on one process or on a ring."""

import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ringspan.proof.batches import Batch
from ringspan.proof.small import VOCABULARY
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.model.layers.decoder import layers_of
from ringspan.torch.model.layers.modules import hidden_of
from ringspan.torch.parallelize import parallelize
from ringspan.torch.shard_batch import shard_batch

STEPS: Final = 2
_PROMPT, _READ_AT_ONCE, _WRITTEN = 75, 17, 6


@dataclass
class Outcome:
    """Results of a run on one batch, whole, in the order of a step."""

    losses: list[Tensor] = field(default_factory=list[Tensor])
    gradients: dict[str, Tensor | None] = field(default_factory=dict[str, Any])
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Weights after the steps, or tokens that were written."""
    logits: Tensor | None = None
    layers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Hidden states after each layer and each of its parts, in the order of their computation."""


def make_model(config: PreTrainedConfig) -> Any:
    """Make a model with the same random weights each time, which computes in float64 throughout."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random) * 0.05
            # A norm's weight stays near one. Some models leave others as they come, so all are made here.
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(noise + 1 if is_norm else noise)
    wide: Any = _in_float64(type(model))[type(model).__name__](model.config).double()
    wide.load_state_dict(model.state_dict())
    wide.set_experts_implementation("eager")  # grouped products know no float64
    return wide.train()


@lru_cache
def _in_float64(kind: type) -> dict[str, Any]:
    """Return what the module of a model has, made again from its source with float64 wherever that says float32."""
    module = sys.modules[kind.__module__]
    with open(str(module.__file__), encoding="utf-8") as file:
        source = file.read()
    source = source.replace(".float()", ".double()")
    source = re.sub(r"\btorch\.float(32)?\b", "torch.float64", source)
    copy = types.ModuleType(module.__name__)
    copy.__package__, copy.__file__ = module.__package__, module.__file__
    # The file is the one that Python has imported already.
    exec(compile(source, str(module.__file__), "exec"), vars(copy))  # noqa: S102
    return vars(copy)


def run_alone(config: PreTrainedConfig, batch: Batch) -> Outcome:
    """Run a batch on plain transformers, each document or row without padding by itself."""
    model, found = make_model(config), Outcome()
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]

    def passed() -> Tensor:
        rows: Any = None
        for row, start, stop in batch.parts:
            logits = model(
                input_ids=ids[row : row + 1, start:stop], use_cache=False
            ).logits
            if rows is None:
                rows = logits.new_zeros(*ids.shape, logits.shape[-1])
            rows = rows.index_put(
                (torch.tensor(row), torch.arange(start, stop)), logits[0]
            )
        return rows

    def loss() -> Tensor:
        return cross_entropy(passed().flatten(0, 1), targets.flatten())

    _train(model, loss, found)
    model.eval()
    with torch.no_grad():
        found.logits = passed()
    return found


def run_on_ring(
    config: PreTrainedConfig, batch: Batch, mesh: DeviceMesh, options: dict[str, Any]
) -> Outcome:
    """Run a batch on a ring; every rank returns the whole outcome."""
    model, found = parallelize(make_model(config), mesh, **options), Outcome()
    how: dict[str, Any] = {
        "layout": options.get("layout", "zigzag"),
        "folds": options.get("folds", 1),
    }
    local = shard_batch(batch.inputs, mesh, **how)
    _train(model, lambda: model(**local).loss, found)
    if how["folds"] > 1:  # numbers of local tokens are folds', one after the other
        return found
    evaluated = dict(local)
    del evaluated["shift_labels"]
    model.eval()
    with torch.no_grad():
        logits: Any = model(**evaluated).logits
    found.logits = _whole(logits, batch, mesh, how["layout"], local)
    return found


def write(model: Any) -> Outcome:
    """Let a model write the most likely tokens after a prompt that a ring reads in chunks, split over its ranks."""
    vars(model)["ring_prefill_tokens"] = _READ_AT_ONCE
    random = torch.Generator().manual_seed(4)
    prompt = torch.randint(3, VOCABULARY, (1, _PROMPT), generator=random)
    with torch.no_grad():
        out = model.eval().generate(
            input_ids=prompt,
            max_new_tokens=_WRITTEN,
            min_new_tokens=_WRITTEN,
            do_sample=False,
            pad_token_id=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = {"the tokens written": out.sequences.double()}
    return Outcome(weights=tokens, logits=torch.stack(out.logits, 1))


def _train(model: nn.Module, loss: Callable[[], Tensor], found: Outcome) -> None:
    """Take optimizer steps; note the losses, the first gradients, and the weights at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(STEPS):
        value = loss()
        found.losses.append(value.detach())
        value.backward()
        if step == 0:
            found.gradients = {
                name: None if p.grad is None else _gathered(p.grad)
                for name, p in model.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {
        f"{name} after the steps": _gathered(p.detach())
        for name, p in model.named_parameters()
    }


def _gathered(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _whole(
    local: Tensor, batch: Batch, mesh: DeviceMesh, layout: Any, given: dict[str, Any]
) -> Tensor:
    """Gather what the ranks of a ring have of each token (B, T, ...) into (B, S, ...)."""
    length, ring = batch.inputs["input_ids"].shape[1], mesh["ring"]
    lengths = given.get("document_lengths")
    split = BatchLayout.of(layout, length, ring.size(), lengths)
    return split.unshard(local, ring.get_group())


def layers_alone(config: PreTrainedConfig, batch: Batch) -> dict[str, Tensor]:
    """Return the hidden states (B, S, C) after every part of every layer, of plain transformers."""
    model = make_model(config)
    ids = batch.inputs["input_ids"]
    found: dict[str, Tensor] = {}
    for row, start, stop in batch.parts:
        with torch.no_grad(), _watching(model) as seen:
            model(input_ids=ids[row : row + 1, start:stop], use_cache=False)
        for name, hidden in seen.items():
            rows = found.setdefault(
                name, hidden.new_zeros(*ids.shape, hidden.shape[-1])
            )
            rows[row, start:stop] = hidden[0]
    return found


def layers_on_ring(
    config: PreTrainedConfig, batch: Batch, mesh: DeviceMesh, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the hidden states (B, S, C) after every part of every layer, gathered from a ring."""
    model = parallelize(make_model(config), mesh, **options)
    layout = options.get("layout", "zigzag")
    local = shard_batch(batch.inputs, mesh, layout=layout)
    with torch.no_grad(), _watching(model) as seen:
        model(**local)
    return {
        name: _whole(hidden, batch, mesh, layout, local)
        for name, hidden in seen.items()
    }


class _watching:
    """Context that notes what layers and their parts return: hidden states (B, T, C) by the path of the module."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._handles = model, list[Any]()

    def __enter__(self) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def note(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: object, output: Any) -> None:
                hidden = hidden_of(output)
                if isinstance(hidden, Tensor) and hidden.ndim == 3:
                    seen[name] = hidden.detach().clone()

            return hook

        for path, layer in layers_of(self._model).items():
            for name, part in [*layer.named_children(), ("", layer)]:
                place = f"{path}.{name}".rstrip(".")
                self._handles.append(part.register_forward_hook(note(place)))
        return seen

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
