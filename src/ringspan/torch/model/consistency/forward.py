"""Checks at the start of a forward pass: this rank's batch is valid, and all ranks were given the same."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import BoundArguments
from typing import Any, Final

import torch
from torch import Tensor

from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.messages.numbers import integer
from ringspan.torch.data.batch import positions_of
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.data.targets import Targets
from ringspan.torch.engine.attention.traced import ends_of
from ringspan.torch.engine.transport.agreement import compared_batch
from ringspan.torch.model.consistency.calls import exchanging, meeting
from ringspan.torch.model.consistency.fixed import (
    calling_parts,
    check_fixed,
    keeping_buffers,
    known_parameters,
)
from ringspan.torch.model.consistency.loop_watch import in_call
from ringspan.torch.model.consistency.optimizers import optimizer_facts
from ringspan.torch.model.layers.positions import beyond_table
from ringspan.torch.model.layers.router_loss import wanted_router
from ringspan.torch.model.layers.view import RingModel, decoder_on_ring
from ringspan.torch.model.memory.sharding import recovering_shards, settle

# In the order of a batch's digest.
_DIGESTS: Final = (
    "input_ids",
    "labels",
    "position_ids",
    "attention_mask",
)
# Those that follow, by the argument of a pass that brings one.
_FURTHER_DIGESTS: Final = {"media": "images and token types", "routes": "routes"}


@contextmanager
def in_pass(model: RingModel, name: str) -> Iterator[None]:
    """Guard a model's call; inference mode becomes no_grad, so that later steps can train its weights."""
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        with in_call(name, is_pass=True), calling_parts(name):
            yield
        if not torch.is_grad_enabled():  # no backward pass will do it
            settle(model)


@contextmanager
def recovering(model: RingModel) -> Iterator[None]:
    """Guard computation: keep buffers unchanged, and restore the shards after an exception."""
    with recovering_shards(model), exchanging(), keeping_buffers(model):
        yield


@torch.compiler.disable()
def agreeing(
    model: RingModel, arguments: dict[str, Any]
) -> AbstractContextManager[None]:
    """Skip comparing masks in this pass, since ranks have compared the documents.

    Masks of images are still compared.
    """
    return (
        nullcontext()
        if arguments.get("media") is not None
        else compared_batch(model.ring_axis.get_group())
    )


@torch.compiler.disable()
def check_forward(
    model: RingModel,
    bind: Callable[[], BoundArguments],
    check_others: Callable[[dict[str, Any]], Any],
    name: str,
) -> dict[str, Any]:
    """Return a pass's arguments, bound by ``bind`` and checked on all ranks, with target count and length."""
    with meeting(model.ring_mesh, name) as facts:
        arguments = {
            name: value for name, value in bind().arguments.items() if name != "self"
        }
        # These are in ``forward``'s signature for tools that read it, but are not supported either.
        others = {
            name: arguments.pop(name)
            for name in ("labels", "attention_mask")
            if name in arguments
        }
        others |= arguments.pop("kwargs", {})
        try:
            check_fixed(
                model
            )  # before ``settle`` puts shards in the place of gathered copies
        finally:
            settle(model)
        check_others(others)
        _check_batch(model, **arguments)
        for each in model.ring_mechanisms:
            each.check(model, arguments)
        targets = arguments.get("shift_labels")
        facts.alike, facts.alike_in_ring = (
            _facts(model, arguments, others),
            _facts_of_ring(arguments),
        )
        if targets is not None:
            places = arguments.get("tree_targets")
            facts.targets = int(Targets(targets, places).times.sum())
    tokens = arguments["input_ids"].shape[1] * model.ring_axis.size()
    defaults = {"num_items_in_batch": facts.targets, "sequence_length": tokens}
    given = {name: value for name, value in arguments.items() if value is not None}
    if facts.targets and given.get("num_items_in_batch") == 0:
        raise UnsupportedError(
            f"num_items_in_batch is 0, and the batch has {facts.targets} targets; leave it out, or count them"
        )
    return defaults | given | others


def _facts(
    model: RingModel, arguments: dict[str, Any], others: dict[str, Any]
) -> dict[str, Any]:
    number = arguments.get("num_items_in_batch")
    return pass_facts(model) | {
        "labels": arguments.get("shift_labels") is not None,
        "output_router_logits": wanted_router(
            model, arguments.get("output_router_logits")
        )
        is not None,
        "num_items_in_batch": None if number is None else _whole_number(number),
        "arguments": tuple(
            sorted(
                (name, str(value))
                for name, value in others.items()
                if value is not None
            )
        ),
    }


def pass_facts(model: RingModel) -> dict[str, Any]:
    """Return facts of a model that must be equal on all ranks, whatever its arguments."""
    kind = model.ring_mesh.device_type
    facts: dict[str, Any] = {
        "model": model.ring_number,
        "mode": "training" if model.training else "evaluation",
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind)
        else None,
    }
    if torch.is_grad_enabled():
        trained = bytes(
            parameter.requires_grad for parameter in known_parameters(model)
        )
        facts["trained parameters"] = (
            f"{sum(trained)} of {len(trained)} ({_digest(trained)})"
        )
        facts |= optimizer_facts(model)
    return facts


def _digest(content: bytes) -> str:
    return f"digest {hashlib.blake2b(content, digest_size=4).hexdigest()}"


def _facts_of_ring(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks of a ring, each under the name that an error shows.

    The batch itself is compared by its digest, one number for each input in ``_DIGESTS``.
    """
    batch_size, length = arguments["input_ids"].shape
    digest, longest = arguments.get("batch_digest"), arguments.get("sequence_length")
    lengths = arguments.get("document_lengths")
    digests = () if digest is None else digest.tolist()
    further = (
        said
        for name, said in _FURTHER_DIGESTS.items()
        if arguments.get(name) is not None
    )
    return {
        "batch size": batch_size,
        "local length": length,
        "documents": None
        if lengths is None
        else _digest(repr(lengths.tolist()).encode()),
        "padding marked": arguments.get("real_tokens") is not None,
        "length of the longest document": None if longest is None else int(longest),
        **{
            name: f"digest {number % (1 << 64):016x}"
            for name, number in zip((*_DIGESTS, *further), digests, strict=False)
        },
    }


def _whole_number(number: object) -> int:
    if isinstance(number, Tensor) and number.numel() == 1:
        number = number.item()
    return integer(number, "num_items_in_batch", UnsupportedError, at_least=0)


def _check_batch(
    model: RingModel, input_ids: Tensor | None = None, position_ids: Tensor | None = None,
    shift_labels: Tensor | None = None, document_lengths: Tensor | None = None, real_tokens: Tensor | None = None,
    sequence_length: int | Tensor | None = None, layout_digest: Tensor | None = None, **_: object,
) -> None:  # fmt: skip
    """Raise UnsupportedError or LayoutError if this rank's part of the batch does not fit the model.

    Checks that inputs are there, the layout and positions, vocabularies, padding, and the length.
    """
    if input_ids is None or position_ids is None:
        raise UnsupportedError(
            "input_ids and position_ids are needed; make the batch with rs.shard_batch"
        )
    if real_tokens is not None and real_tokens.shape != input_ids.shape:
        raise UnsupportedError(
            f"real_tokens has shape {tuple(real_tokens.shape)}, input_ids {tuple(input_ids.shape)}; make the batch "
            "with rs.shard_batch"
        )
    ring = model.ring_axis
    tokens = ring.size() * input_ids.shape[1]
    split = BatchLayout.of(
        model.ring_layout, tokens, ring.size(), document_lengths, model.ring_folds
    )
    inputs, labels = model.ring_vocabularies
    longest = split.shared.length if sequence_length is None else int(sequence_length)
    # If the longest document is a whole row, positions may count over rows, as they do after padding on the left.
    is_whole = document_lengths is not None and longest == int(
        ends_of(document_lengths).max()
    )
    counted = [document_lengths, None] if is_whole else [document_lengths]
    _check_layout(model, position_ids, layout_digest, split, counted)
    check_entries("input_ids", input_ids, inputs)
    if model.ring_skipped is not None:
        rows = split.positions(ring.get_local_rank()).to(input_ids.device)
        ends = (
            longest
            if document_lengths is None
            else ends_of(document_lengths).to(input_ids.device)
        )
        _check_skipped(
            model.ring_skipped,
            input_ids,
            rows < ends if real_tokens is None else real_tokens,
        )
    if error := beyond_table(model, decoder_on_ring(model), longest):
        raise error
    if shift_labels is not None and labels:  # a classifier has no vocabulary
        check_entries(
            "labels", shift_labels.masked_fill(shift_labels == IGNORED, 0), labels
        )


def _check_layout(
    model: RingModel,
    positions: Tensor,
    digest: Tensor | None,
    split: BatchLayout,
    counted: Sequence[Tensor | None],
) -> None:
    """Raise LayoutError unless the positions are those that ``shard_batch`` makes for this layout and rank.

    ``counted`` are the document lengths that positions may restart with: the batch's own, and if allowed, none.
    """
    layout, name, rank = (
        split.shared,
        model.ring_layout,
        model.ring_axis.get_local_rank(),
    )
    rows = [len(split.rows) if lengths is None else len(lengths) for lengths in counted]
    expected = (
        positions_of(split, rank, *each) for each in zip(counted, rows, strict=True)
    )
    folds = f", folds={model.ring_folds}" if model.ring_folds > 1 else ""
    remedy = f"use rs.shard_batch(batch, mesh, layout={name!r}{folds})"
    if positions.shape[-1] != layout.tokens_per_rank or not any(
        bool((positions == each.to(positions.device)).all()) for each in expected
    ):
        raise LayoutError(f"position_ids are not those of the layout {name}; {remedy}")
    if digest is not None and int(digest) != int(split.digest(rank)):
        raise LayoutError(
            f"the batch was split by another layout than {name}, or for another mesh; {remedy}"
        )


def _check_skipped(token: int, input_ids: Tensor, is_real: Tensor) -> None:
    if bool(((input_ids == token) & is_real).any()):
        raise UnsupportedError(
            f"input_ids has the pad token {token} where no padding is marked: this model skips it when it counts "
            "positions, and a ring counts every token; mark padding by an attention_mask, and leave none "
            "inside"
        )


def check_entries(name: str, numbers: Tensor, vocabulary: int) -> None:
    if not bool(((numbers >= 0) & (numbers < vocabulary)).all()):
        raise UnsupportedError(
            f"{name} has numbers outside of the vocabulary, 0 to {vocabulary - 1}; pad with one"
        )
