"""This rank's part of a tree of segments, whose tokens are computed once and may have several targets.

S tokens of the tree, T local tokens, R targets.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.tree import Tree, shared_prefixes
from ringspan.core.messages.numbers import check_whole
from ringspan.core.names import BatchLayoutName, PrefixLossName
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.data.padding import FILLER, IGNORED
from ringspan.torch.engine.transport.digest import digest_integers
from ringspan.torch.model.mechanism import Sharding

SEGMENTS: Final = frozenset({"segment_lengths", "segment_parents"})
_TAKEN: Final = SEGMENTS | {"input_ids", "labels"}


class Scored(NamedTuple):
    """Targets of a tree, (R,) each: the predicting token's place, the target, its result's index, its weight."""

    places: Tensor
    targets: Tensor
    results: Tensor
    weights: Tensor


class SharedPrefixes(NamedTuple):
    """A batch for ``shard_batch``, and the place of each row's tokens in it."""

    batch: dict[str, Tensor]
    places: list[Tensor]


def share_prefixes(
    rows: Sequence[Sequence[int] | Tensor],
    labels: Sequence[Sequence[int] | Tensor] | None = None,
    *,
    min_shared_tokens: int = 64,
) -> SharedPrefixes:
    """Store the equal beginnings of rows of tokens once: a batch of one row for ``shard_batch``.

    Tokens and labels of row i are ``batch["input_ids"][0, places[i]]`` and ``batch["labels"][0, places[i]]``, and so is
    what ``token_logprobs`` returns for it. The last token of a row is its own.

    Args:
        rows: tokens, of any lengths from 1.
        labels: one for each token, unshifted, -100 for none.
        min_shared_tokens: the shortest segment that rows share.

    Raises:
        ConfigError: ``min_shared_tokens`` below 1.
        UnsupportedError: no rows, or an empty one; labels of other lengths, or that differ on a token that is shared.
    """
    check_whole("min_shared_tokens", min_shared_tokens)
    whole = [torch.as_tensor(row).cpu().long() for row in rows]
    if not whole or any(row.ndim != 1 or not len(row) for row in whole):
        raise UnsupportedError(
            "share_prefixes needs rows of tokens, none of them empty"
        )
    tree, tokens, places = shared_prefixes(
        [row.numpy() for row in whole], min_shared_tokens
    )
    found = [torch.from_numpy(each) for each in places]
    batch = {
        "input_ids": torch.from_numpy(tokens)[None],
        "segment_lengths": torch.tensor(tree.lengths),
        "segment_parents": torch.tensor(tree.parents),
    }
    if labels is not None:
        batch["labels"] = _shared_labels(batch["input_ids"], whole, found, labels)
    return SharedPrefixes(batch, found)


def _shared_labels(
    tokens: Tensor,
    whole: list[Tensor],
    places: list[Tensor],
    labels: Sequence[Sequence[int] | Tensor],
) -> Tensor:
    """Return the labels of shared tokens; UnsupportedError unless each row has its own, equal where tokens are."""
    targets = [torch.as_tensor(each).cpu().long() for each in labels]
    shared = torch.full_like(tokens, IGNORED)
    if [each.shape for each in targets] != [each.shape for each in whole]:
        raise UnsupportedError(
            "share_prefixes needs a label for each token of each row; use -100 for none"
        )
    for own, each in zip(places, targets, strict=True):
        shared[0, own] = each
    for number, (own, each) in enumerate(zip(places, targets, strict=True)):
        if not torch.equal(shared[0, own], each):
            raise UnsupportedError(
                f"row {number} has other labels than a row whose tokens it shares; give both the same, or raise "
                "min_shared_tokens"
            )
    return shared


def shard_segments(batch: Mapping[str, Any], how: Sharding) -> dict[str, Any]:
    """Return this rank's part of a batch with ``segment_lengths``, as ``shard_batch`` does."""
    if unknown := sorted(set(batch) - _TAKEN):
        raise UnsupportedError(
            f"a tree of segments takes {', '.join(sorted(_TAKEN))}, and no {', '.join(unknown)}; leave it out"
        )
    if missing := sorted(SEGMENTS - set(batch)):
        raise UnsupportedError(f"a tree of segments also needs {missing[0]}")
    tokens = batch["input_ids"]
    if len(tokens) != 1:
        raise UnsupportedError(
            f"a tree of segments is one row, input_ids has {len(tokens)}; use share_prefixes"
        )
    tree = Tree(
        *(
            tuple(batch[name].flatten().tolist())
            for name in ("segment_lengths", "segment_parents")
        )
    )
    tree.mask()  # raises for what is no tree
    rest = tokens.shape[1] - sum(tree.lengths)
    if rest < 0:
        raise UnsupportedError(
            f"segment_lengths add up to {sum(tree.lengths)}, input_ids has {tokens.shape[1]} tokens"
        )
    scored = None
    if (labels := batch.get("labels")) is not None:
        if labels.shape != tokens.shape or labels.is_floating_point():
            raise UnsupportedError(
                f"labels must be integers of shape {tuple(tokens.shape)}, as input_ids"
            )
        scored = _scored(labels.cpu().long()[0], tree, how.prefix_loss)
    return shard_tree(tokens, tree, scored, how.mesh, how.layout, how.device)


def _scored(labels: Tensor, tree: Tree, prefix_loss: PrefixLossName) -> Scored:
    """Return the targets of a tree: each labelled token, predicted by the token before it in its branch.

    Its weight is 1, or for "each" the number of branches that share it; for "none" shared segments have no targets.
    """
    weights, padded = np.array(tree.leaves), len(labels) - sum(tree.lengths)
    if prefix_loss != "each":
        inner = np.isin(np.arange(len(weights)), tree.parents)
        weights = np.where(inner & (prefix_loss == "none"), 0, 1)
    each = torch.from_numpy(np.pad(np.repeat(weights, tree.lengths), (0, padded)))
    before = torch.from_numpy(np.pad(tree.before(), (0, padded), constant_values=-1))
    if bool((labels[len(labels) - padded :] != IGNORED).any()):
        raise UnsupportedError(
            "labels behind the last segment must be -100: these tokens are padding"
        )
    [own] = ((labels != IGNORED) & (before >= 0) & (each > 0)).nonzero(as_tuple=True)
    return Scored(before[own], labels[own], own, each[own])


def shard_tree(
    tokens: Tensor, tree: Tree, scored: Scored | None, mesh: DeviceMesh, layout: BatchLayoutName,
    device: torch.device | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return this rank's part of a tree's tokens (1, S), with padding after the last segment, and its targets."""
    ring, copies, longest = (
        mesh.get_group("ring"),
        np.repeat(tree.leaves, tree.lengths),
        tree.longest,
    )
    rest = tokens.shape[1] - len(copies)
    if rest:
        tree = Tree((*tree.lengths, rest), (*tree.parents, -1))
    lengths = torch.tensor([[*zip(*tree, strict=True)]])
    split, rank = (
        BatchLayout.of(layout, tokens.shape[1], ring.size(), lengths),
        ring.rank(),
    )
    own = split.positions(rank)
    local = {
        "input_ids": split.shard(tokens, rank, value=FILLER),
        "position_ids": torch.from_numpy(
            tree.positions(split.shared.padded_length)
        ).int()[own],
        "document_lengths": lengths,
        # For routers, a token counts once for each row that has it.
        "real_tokens": split.shard(
            torch.from_numpy(np.pad(copies, (0, rest)))[None], rank
        ),
    }
    if scored is not None:
        local_row = torch.full((split.shared.padded_length,), -1)
        local_row[own[0]] = torch.arange(own.shape[1])
        rows = local_row[scored.places]
        mine = rows >= 0
        numbers = [rows, scored.results]
        if bool(
            (scored.weights > 1).any()
        ):  # without weights above 1, the loss needs none
            numbers.append(scored.weights)
        found, targets = torch.stack(numbers, 1)[mine], scored.targets[mine]
        if not len(found):  # a rank without targets takes part in the loss
            found, targets = (
                found.new_zeros(1, len(numbers)),
                targets.new_full((1,), IGNORED),
            )
        local |= {"tree_targets": found, "shift_labels": targets[None]}
    parts = {
        name: part.to(device or tokens.device).contiguous()
        for name, part in local.items()
    }
    digested = (tokens, None if scored is None else torch.stack(scored), lengths, None)
    return parts | {
        "sequence_length": torch.tensor(longest),
        "batch_digest": torch.stack(
            [digest_integers(x).to(tokens.device) for x in digested]
        ),
        "layout_digest": split.digest(rank),
    }
