"""Two training steps, an evaluation and a generation, by plain transformers on one process or on a ring."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ringspan.proof.batches import Batch
from ringspan.proof.float64 import in_float64_of
from ringspan.proof.small import VOCABULARY
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.model.layers.decoder import layers_of
from ringspan.torch.model.layers.modules import hidden_of, whole
from ringspan.torch.model.tasks.causal_lm import gathered_tokens
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
    wide = in_float64_of(model)
    wide.set_experts_implementation("eager")  # grouped products know no float64
    return wide.train()


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
    local = _local(batch, mesh, options)
    _train(model, lambda: model(**local).loss, found)
    evaluated = {name: x for name, x in local.items() if name != "shift_labels"}
    model.eval()
    with torch.no_grad():
        logits = model(**evaluated).logits
        found.logits = _everywhere(model, logits, batch, local)
    return found


def _local(batch: Batch, mesh: DeviceMesh, options: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a batch for the options of ``parallelize``."""
    how = {name: options[name] for name in ("layout", "folds") if name in options}
    return shard_batch(batch.inputs, mesh, **how)


def _everywhere(
    model: Any, part: Tensor, batch: Batch, local: dict[str, Any]
) -> Tensor:
    """Gather what the ranks of a ring have of each token (B, T, ...) into (B, S, ...)."""
    length = batch.inputs["input_ids"].shape[1]
    return gathered_tokens(model, part, length, local.get("document_lengths"))


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
                name: None if p.grad is None else whole(p.grad).clone()
                for name, p in model.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {
        f"{name} after the steps": whole(p.detach()).clone()
        for name, p in model.named_parameters()
    }


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
    local = _local(batch, mesh, options)
    with torch.no_grad(), _watching(model) as seen:
        model(**local)
    return {
        name: _everywhere(model, hidden, batch, local) for name, hidden in seen.items()
    }


@contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Note what layers and their parts return: hidden states (B, T, C) by the path of the module."""
    seen: dict[str, Tensor] = {}

    def noting(place: str) -> Callable[..., None]:
        def note(_: nn.Module, args: object, output: Any) -> None:
            hidden = hidden_of(output)
            if isinstance(hidden, Tensor) and hidden.ndim == 3:
                seen[place] = hidden.detach().clone()

        return note

    handles = [
        part.register_forward_hook(noting(f"{path}.{name}".rstrip(".")))
        for path, layer in layers_of(model).items()
        for name, part in [*layer.named_children(), ("", layer)]
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
