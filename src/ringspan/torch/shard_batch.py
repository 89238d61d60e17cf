"""This rank's part of a whole batch, with what each mechanism makes of its keys."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import ConfigError
from ringspan.core.mechanisms import refuse_pairs
from ringspan.core.names import (
    PREFIX_LOSS_NAMES,
    BatchLayoutName,
    PrefixLossName,
    find_name,
)
from ringspan.torch.data.batch import ROWS, check_given, shard_rows
from ringspan.torch.mechanisms.every import MECHANISMS
from ringspan.torch.model.mechanism import Sharding
from ringspan.torch.runtime.foreign_mesh import ring_mesh

TAKEN: Final = ROWS.union(*(each.keys for each in MECHANISMS))
"""Keys of a batch that ``shard_batch`` takes."""


def shard_batch(
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    layout: BatchLayoutName = "zigzag",
    folds: int = 1,
    device: torch.device | None = None,
    prefix_loss: PrefixLossName = "once",
) -> dict[str, Any]:
    """Return this rank's part of a Hugging Face batch, ready for a model that ``parallelize`` prepared.

    Ranks of one ring pass the same whole batch, replicas different ones. Labels are shifted here, before the
    permutation; padding gets the label -100 and comes last, unseen by real tokens.

    Args:
        batch: ``input_ids`` (B, S); ``labels`` (B, S), unshifted, or ``shift_labels``, with token i's target in entry i
            or -100; ``attention_mask`` (B, S), 0 for padding left or right of tokens or whole rows, without targets;
            ``position_ids`` (B, S) or (S,), from 0 for each packed document; of flattened batches (transformers, TRL)
            ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (documents + 1,), ``max_length_q`` and ``max_length_k``, ``seq_idx``
            (1, S). Images and videos of docs/multimodal.md by the names of transformers' processors (``pixel_values``,
            ``image_grid_thw``, ...), best on the CPU. ``routes`` (B, S, layers, K), as of ``token_routes``: experts
            that tokens go to, -1 for the router's own choice. Or a tree: ``input_ids`` (1, S), ``labels``,
            ``segment_lengths`` and ``segment_parents`` (segments,), as of ``rs.tree``; positions count along branches,
            and a parent's last token predicts the first of each child. None entries are left out.
        mesh: the mesh of the model.
        layout: as given to ``parallelize``. ``balanced`` makes one for the documents of each sequence.
        folds: as given to ``parallelize``.
        device: of the result; that of ``input_ids`` if None.
        prefix_loss: count targets in segments that others continue ``once``, once in ``each`` branch, as separate
            rows do, or not at all (``none``).

    Returns:
        ``input_ids``, ``position_ids`` (int32) and, given labels, ``shift_labels``, each (B, T); ``document_lengths``
        (B, most documents), 0 after the last one, if packed or padded on the left, where padding is a document counted
        with the tokens after it; ``real_tokens`` (B, T) if there is padding, for expert routers; ``sequence_length``,
        of the longest document or row, on the CPU; ``media``; ``batch_digest`` of tokens, targets, documents, padding
        (and ``media``) and ``layout_digest``, to check that ranks got the same batch, and the model's layout.
        Of a tree, ``document_lengths`` are lengths and parents (1, segments, 2), ``shift_labels`` (1, R) this rank's
        targets, ``tree_targets`` (R, 2) their local tokens and places in the row; (R, 3) with weights if any is not 1.

    Raises:
        UnsupportedError: keys, masks or positions that cannot be honoured, by name.
    """
    find_name("prefix_loss", prefix_loss, PREFIX_LOSS_NAMES, ConfigError)
    batch = {name: value for name, value in batch.items() if value is not None}
    check_given(batch, TAKEN)
    how = Sharding(ring_mesh(mesh), layout, folds, device, prefix_loss)
    found = {each.name: each.found_in_batch(batch, how) for each in MECHANISMS}
    refuse_pairs(found, "this batch")
    for each in MECHANISMS:
        if (whole := each.shard(batch, how)) is not None:
            return whole
    beside: dict[str, Any] = {}
    of_tokens: dict[str, tuple[Tensor, int]] = {}
    digests: list[int] = []
    for each in MECHANISMS:
        values, numbers = each.added(batch)
        beside |= values
        digests += numbers
        for name in each.of_tokens.keys() & set(batch):
            of_tokens[name] = batch[name], each.of_tokens[name]
    return shard_rows(batch, how, digests, of_tokens) | beside
