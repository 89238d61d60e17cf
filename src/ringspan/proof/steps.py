"""Two training steps, an evaluation and a generation, by plain transformers on one process or on a ring."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ringspan.proof.batches import Batch, random_tokens
from ringspan.proof.routed import EVALUATION, LiveRoutes, PlainRoutes
from ringspan.proof.seeing import language_layers
from ringspan.proof.trial import Trial, computing_in
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.mechanisms.routes.recording import Recorded
from ringspan.torch.model.adapters import base_of
from ringspan.torch.model.layers.modules import hidden_of, whole
from ringspan.torch.model.layers.positions import may_begin_anywhere
from ringspan.torch.model.layers.routing import ROUTES
from ringspan.torch.model.memory.gradients import (
    accumulate,
    clip_gradients,
    gradient_norm,
)
from ringspan.torch.model.tasks.causal_lm import gathered_tokens
from ringspan.torch.model.weights.shards import join_slices
from ringspan.torch.parallelize import parallelize
from ringspan.torch.shard_batch import shard_batch

STEPS: Final = 2
_EPS: Final = 1e-4
_EPS_OF_ROUNDED: Final = 1e-2
"""AdamW moves a weight by the rate whatever its gradient's size, but for ``eps``: rounding of the smallest gradients,
which may change their sign, is not to decide where weights go."""
_PROMPT, _READ_AT_ONCE, _WRITTEN = 75, 17, 6
_SPLIT: Final = ("layout", "folds")  # options that a batch takes too


@dataclass
class Outcome:
    """Results of a run on one batch, whole, in the order of a step."""

    losses: list[Tensor] = field(default_factory=list[Tensor])
    gradients: dict[str, Tensor | None] = field(default_factory=dict[str, Any])
    norms: list[Tensor] = field(default_factory=list[Tensor])
    """Norms of the whole gradient of each step, if they have a limit."""
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Weights after the steps, or tokens that were written."""
    logits: Tensor | None = None
    routes: Sequence[Tensor] = ()
    """Experts (B, S, layers, K) that one process in float64 chose in each pass, if narrower dtypes go there too."""
    choice: Tensor | None = None
    """Experts that the routers themselves chose in evaluation."""
    counts_padding: bool = False
    """True if the model's positions count padding on the left, so that one process has to read it too."""


def run_alone(
    trial: Trial,
    batch: Batch,
    dtype: torch.dtype | None = None,
    routes: Sequence[Tensor] | None = None,
    *,
    notes_routes: bool = False,
) -> Outcome:
    """Run a batch on plain transformers, each document, branch or row without padding separately.

    In the trial's dtype, or with the same numbers and all code in a wider one. Tokens go to the experts of ``routes``,
    a pass each, if they are given; with ``notes_routes``, the outcome has those that they went to.
    """
    model, found = trial.make(dtype), Outcome()
    call, reads = _caller(model, trial, dtype), dtype or trial.dtype
    micro, count = _micro_batches(trial, batch)
    ways = _ways(model, batch, routes, notes_routes=notes_routes)

    def losses(step: int) -> Iterator[Tensor]:
        for number, part in enumerate(micro):
            with ways.passing(step * len(micro) + number):
                read = _logits(call, part, reads, ways)
                pairs = zip(read, _targets(part), strict=True)
                total: Any = sum(
                    _loss_of(logits, wanted, trial.options) for logits, wanted in pairs
                )
            loss = total / count
            loss.backward()
            yield loss.detach()

    def clip(trained: list[Tensor]) -> Tensor:
        return nn.utils.clip_grad_norm_(trained, trial.most_norm)

    _train(model, losses, clip, found, trial)
    if not batch.is_tree:
        model.eval()
        with torch.no_grad(), ways.passing(EVALUATION):
            found.logits = _joined(_logits(call, batch, reads, ways), batch)
    if ways.live:
        found.choice = ways.live[EVALUATION]
        found.routes = ways.live if notes_routes else ()
    return found


def _micro_batches(trial: Trial, batch: Batch) -> tuple[list[Batch], int]:
    """Return the micro-batches of a step, and the targets of all of them."""
    micro = [batch.micro(number) for number in range(trial.micro_steps)]
    targets = [part for each in micro for part in _targets(each)]
    return micro, sum(int((part != IGNORED).sum()) for part in targets)


def _ways(
    model: Any,
    batch: Batch,
    routes: Sequence[Tensor] | None,
    *,
    notes_routes: bool = False,
) -> PlainRoutes | LiveRoutes:
    """Return what answers the routers of a plain model, or nothing that does."""
    if routes or notes_routes:
        return PlainRoutes(model, batch, routes)
    return LiveRoutes()


def _caller(model: Any, trial: Trial, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return the call of a plain model in the dtype that layers compute in."""
    if dtype is not None or trial.dtype == trial.parameters:
        return model
    return computing_in(model, trial.dtype)


def _logits(
    call: Callable[..., Any],
    batch: Batch,
    dtype: torch.dtype,
    ways: PlainRoutes | LiveRoutes,
) -> Iterator[Tensor]:
    """Yield the logits (1, T, V) of each part of a batch."""
    media = _floats_in(batch.seen, dtype)
    for row, places in batch.parts:
        with ways.part(row, places):
            out = call(**batch.read(row, places), use_cache=False, **media)
        yield out.logits


def _targets(batch: Batch) -> Iterator[Tensor]:
    """Yield the targets (T,) of each part of a batch, the next token's label."""
    for row, places in batch.parts:
        labels = batch.inputs["labels"][row, list(places)]
        yield torch.cat([labels[1:], torch.full_like(labels[:1], IGNORED)])


def _loss_of(logits: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the sum over targets of cross-entropy with label smoothing, and of the squared log-sum-exp."""
    logits = logits[0] if logits.dtype == torch.float64 else logits[0].float()
    smoothing = options.get("label_smoothing", 0.0)
    loss = cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    if factor := options.get("z_loss", 0.0):
        loss = loss + factor * logits.logsumexp(-1)[targets != IGNORED].square().sum()
    return loss


def _joined(parts: Iterable[Tensor], batch: Batch) -> Tensor:
    """Return what parts of a batch have (1, T, ...) in their places of the whole one (B, S, ...); 0 for padding."""
    whole_one: Any = None
    for (row, places), part in zip(batch.parts, parts, strict=True):
        if whole_one is None:
            whole_one = part.new_zeros(
                *batch.inputs["input_ids"].shape, *part.shape[2:]
            )
        whole_one[row, list(places)] = part[0]
    return whole_one


def run_on_ring(
    trial: Trial,
    batch: Batch,
    routes_of: Callable[[bool], Sequence[Tensor]] = lambda _: (),
) -> Outcome:
    """Run a batch on a ring; every rank returns the whole outcome.

    ``routes_of`` says which experts tokens go to in each pass, if positions count padding, or do not.
    """
    model, found = on_ring(trial), Outcome()
    base: Any = base_of(model)
    found.counts_padding = not may_begin_anywhere(base)
    routes = routes_of(found.counts_padding)
    micro, count = _micro_batches(trial, batch)
    count *= trial.mesh["replicate"].size()  # each replica has the same batch

    def losses(step: int) -> Iterator[Tensor]:
        ways = routes[step * len(micro) :] or [None] * len(micro)
        parts = [_local(trial, *each) for each in zip(micro, ways, strict=False)]
        if len(parts) == 1:
            loss = model(**parts[0]).loss
            loss.backward()
            yield loss.detach()
            return
        for output in accumulate(model, parts, len(parts), count):
            yield output.loss.detach()

    def clip(trained: list[Tensor]) -> Tensor:
        norm = whole(gradient_norm(trained))
        clip_gradients(trained, norm, trial.most_norm)
        return norm

    _train(model, losses, clip, found, trial)
    if batch.is_tree:
        return found
    last = routes[EVALUATION] if routes else None
    local, recorded = _local(trial, batch, last), Recorded()
    evaluated = {name: x for name, x in local.items() if name != "shift_labels"}
    model.eval()
    with torch.no_grad(), recorded.recording() if routes else nullcontext():
        logits = model(**evaluated).logits
        found.logits = _everywhere(model, logits, batch, local)
    if routes:
        found.choice = recorded.whole_live(base, local)
    return found


def on_ring(trial: Trial) -> Any:
    """Make the model, and put it on the ring with the trial's options."""
    return parallelize(trial.make(), trial.mesh, **trial.given)


def _local(trial: Trial, batch: Batch, routes: Tensor | None = None) -> dict[str, Any]:
    """Return this rank's part of a batch for the options of ``parallelize``, with the experts of its tokens."""
    how = {name: trial.options[name] for name in _SPLIT if name in trial.options}
    if batch.is_tree:
        how["prefix_loss"] = "each"  # as often as in rows of their own
    inputs = _floats_in(batch.inputs, trial.parameters)
    if routes is not None:
        inputs[ROUTES] = routes
    return shard_batch(inputs, trial.mesh, **how)


def _floats_in(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return inputs, with the numbers of images in a dtype."""
    return {
        name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()
    }


def _everywhere(
    model: Any, part: Tensor, batch: Batch, local: dict[str, Any]
) -> Tensor:
    """Gather what the ranks of a ring have of each token (B, T, ...) into (B, S, ...)."""
    length = batch.inputs["input_ids"].shape[1]
    base: Any = base_of(model)
    return gathered_tokens(base, part, length, local.get("document_lengths"))


def write(model: Any, vocabulary: int) -> Outcome:
    """Let a model write the most likely tokens after a prompt that a ring reads in chunks, split over its ranks."""
    vars(base_of(model))["ring_prefill_tokens"] = _READ_AT_ONCE
    prompt = random_tokens(1, _PROMPT, vocabulary, 4)
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


def _train(
    model: nn.Module,
    losses: Callable[[int], Iterable[Tensor]],
    clip: Callable[[list[Tensor]], Tensor],
    found: Outcome,
    trial: Trial,
) -> None:
    """Take optimizer steps; note the losses, the first gradients, their norms, and the weights at the end.

    ``losses`` runs the micro-batches of a step forward and backward; ``clip`` scales gradients and returns their norm.
    """
    eps = _EPS if trial.is_exact_dtype else _EPS_OF_ROUNDED
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=eps)
    for step in range(STEPS):
        found.losses.append(torch.stack([*losses(step)]).sum())
        if step == 0:
            gradients = {
                name: None if p.grad is None else whole(p.grad).clone()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
            found.gradients = join_slices(gradients)
        if trial.most_norm:
            found.norms.append(clip([p for p in trained if p.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
    weights = {
        f"{name} after the steps": whole(p.detach()).clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    found.weights = join_slices(weights)


def layers_alone(
    trial: Trial,
    batch: Batch,
    dtype: torch.dtype | None = None,
    routes: Sequence[Tensor] = (),
) -> dict[str, Tensor]:
    """Return the hidden states (B, S, C) after every part of every layer, of plain transformers."""
    model = trial.make(dtype)
    ways = _ways(model, batch, routes)
    call, seen = _caller(model, trial, dtype), list[dict[str, Tensor]]()
    media = _floats_in(batch.seen, dtype or trial.dtype)
    with torch.no_grad(), ways.passing(0):
        for row, places in batch.parts:
            with ways.part(row, places), _watching(model) as found:
                call(**batch.read(row, places), use_cache=False, **media)
            seen.append(found)
    return {
        name: _joined((found[name] for found in seen), batch)
        for name in seen[0]
        if all(name in found for found in seen)
    }


def layers_on_ring(
    trial: Trial, batch: Batch, routes: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """Return the hidden states (B, S, C) after every part of every layer, gathered from a ring."""
    first = routes[0] if routes else None
    model, local = on_ring(trial), _local(trial, batch, first)
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
        for path, layer in language_layers(base_of(model)).items()
        for name, part in [*layer.named_children(), ("", layer)]
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
