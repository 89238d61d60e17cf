"""Cache for transformers' ``generate``: keys and values split over a ring, states whole on each rank."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.geometry.shares import BLOCK_TOKENS, Shares
from ringspan.torch.engine.attention.cached import Turn, current_turn
from ringspan.torch.generate.cache.identity import Reader
from ringspan.torch.generate.cache.pools import Pools, Tail
from ringspan.torch.generate.cache.quantised import QuantisedRows, check_dtype, new_rows
from ringspan.torch.generate.cache.rows import Rows
from ringspan.torch.generate.cache.states import Rearranged, StateLayer
from ringspan.torch.model.layers.modules import refusing


class RingCache(Cache):
    """A sequence's keys and values, split over a ring's ranks; from ``model.new_cache()``, for ``generate``."""

    layers: list[Any]

    def __init__(
        self,
        kinds: Sequence[LayerMask | None],
        ranks: int,
        rank: int,
        dtype: str | None = None,
        states: Sequence[int] = (),
    ) -> None:
        """Create the empty cache of one rank.

        ``kinds``: each layer's mask, None if it keeps no keys and values. ``ranks``, ``rank``: the ring's size and this
        rank in it. ``dtype``: of quantised keys and values, None to keep them as the model computes them. ``states``:
        the number of states of each layer, 0 without.
        """
        check_dtype(dtype)
        self.dtype: Final = dtype
        self.shares = Shares(ranks)
        self.rank = rank
        self.records_past = False
        self.reader: Reader | None = None
        self._ids = Rows()
        counts = states or [0] * len(kinds)
        super().__init__(
            layers=[
                _layer(self, kind, count)
                for kind, count in zip(kinds, counts, strict=True)
            ]
        )
        self._num_layers = len(self.layers)
        self.keepers = [
            layer
            for layer in self.layers
            if isinstance(layer, RingLayer) and layer.kind is not None
        ]
        self.stateful = [
            layer for layer in self.layers if isinstance(layer, StateLayer)
        ]

    @property
    def nbytes(self) -> int:
        keys = sum(
            rows.nbytes
            for layer in self.layers
            if isinstance(layer, RingLayer)
            for rows in layer.rows
        )
        kept = sum(each.nbytes for layer in self.layers for each in layer.kept.values())
        return keys + kept + sum(layer.nbytes for layer in self.stateful)

    @property
    def ids(self) -> Tensor:
        """Return all cached tokens (B, L) in CPU memory, on every rank."""
        return self._ids.tensor[:, 0, :, 0]

    @property
    def shifts(self) -> Tensor:
        """Return each token's position less its number (B, L), on the CPU; 0 without images (M-RoPE)."""
        return self._ids.tensor[:, 0, :, 1]

    def last_shifts(self, rows: int) -> Tensor:
        """Return the last token's shift for some sequences (B, 1), a multiple of the cache's."""
        if not self._ids.count:
            return torch.zeros(rows, 1, dtype=torch.int64)
        return self.shifts[:, -1].reshape(rows, -1)[:, :1]

    def keep_ids(self, ids: Tensor, shifts: Tensor | None = None) -> None:
        ids = ids.cpu()
        shifts = torch.zeros_like(ids) if shifts is None else shifts.to(ids)
        self._ids.append(torch.stack((ids, shifts), -1)[:, None])

    @property
    def num_sequences(self) -> int | None:
        return len(self.ids) if self._ids.count else None

    @property
    def firsts(self) -> dict[LayerMask, int]:
        """Return the first position still held, by kind of layer."""
        firsts: dict[LayerMask, int] = {}
        for layer in self.keepers:
            assert layer.kind is not None
            firsts[layer.kind] = max(layer.first, firsts.get(layer.kind, 0))
        return firsts

    @property
    def behind(self) -> list[int]:
        """Return the numbers of layers that lack the last tokens: empty unless a pass failed."""
        return [
            number
            for number, layer in enumerate(self.layers)
            if layer in self.keepers and layer.length != self.shares.length
        ]

    def read_by(self, reader: Reader) -> None:
        """Register the reader of the next tokens; UnsupportedError for another model, weights or adapters."""
        before = self.reader
        if self.shares.length and reader != before:
            remedy = "read the text again into model.new_cache()"
            if before is None or before.model != reader.model:
                why, remedy = (
                    "by another model",
                    f"{remedy}, or save_cache of that one and load_cache",
                )
            elif before.adapters != reader.adapters:
                old, new = (
                    ", ".join(sorted(set(each.adapters))) for each in (before, reader)
                )
                why, remedy = (
                    f"with other adapters ({old}, now {new})",
                    f"{remedy}, or switch them back",
                )
            else:
                why = "before the weights changed"
            raise UnsupportedError(
                f"the {self.shares.length} tokens in the cache were read {why}; {remedy}"
            )
        self.reader = reader

    def check_complete(self) -> None:
        # A pass notes its tokens at its end, after every layer has read them.
        if self._ids.count != self.shares.length:
            behind = ", ".join(map(str, self.behind)) or (
                "with a state" if self.stateful else ""
            )
            raise UnsupportedError(
                "the cache is incomplete: a pass over it failed"
                f"{behind and f', and layers {behind} lack its last tokens'}; call reset() of it and read the text "
                "again"
            )

    def check_updated(self, model_name: str) -> None:
        """Raise UnsupportedError if a model has added layers to its cache, or a layer lacks the last tokens."""
        if len(self.layers) != self._num_layers:
            raise UnsupportedError(
                f"{model_name} does not generate on a ring: it adds layers to its cache while it reads; generate on "
                "one process"
            )
        if behind := self.behind:
            raise UnsupportedError(
                f"{model_name} does not generate on a ring: layers {', '.join(map(str, behind))} keep no keys "
                "and values of their own in transformers' cache"
            )

    def tail(self, layer: int, name: str, reach: int) -> Tail:
        """Return the last inputs of a layer's tokens, for windows of ``reach`` tokens."""
        return self.layers[layer].kept.setdefault(name, Tail(reach))

    def pools(self, layer: int, size: int, reach: int) -> Pools:
        """Return entries of a layer's windows, which begin every ``size`` tokens and have ``reach`` of them."""
        pools = Pools(size, reach, self.rank, self.shares.ranks)
        return self.layers[layer].kept.setdefault("pools", pools)

    def add(self, count: int, *, is_split: bool) -> CustomLayout:
        return self.shares.split(count) if is_split else self.shares.deal(count)

    @property
    def is_linear(self) -> list[bool]:
        """Return for each layer True if it has a state and no keys, for transformers' masks."""
        # All are False in a model with only such layers: ``generate`` would reread the cached text.
        linear = [
            isinstance(layer, StateLayer) and not isinstance(layer, RingLayer)
            for layer in self.layers
        ]
        return [False] * len(linear) if all(linear) else linear

    def reserve(self, length: int) -> None:
        """Allocate this rank's share of ``length`` tokens at once: moving keys later needs twice the memory."""
        share = -(-length // self.shares.ranks) + BLOCK_TOKENS
        for layer in self.keepers:
            if layer.keeps_all:
                layer.reserve(share)

    def activate_past_recording(self) -> None:
        """Keep everything until ``crop``, so that the last tokens can be taken back."""
        self.records_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; positive before transformers 5.20: the length to keep.

        UnsupportedError for more tokens than there are, a layer with a state or dropped keys, or an incomplete cache.
        """
        self.check_complete()
        if self.stateful:
            raise UnsupportedError(
                "cannot crop a cache of layers with a state, out of which no token is taken; read the text again into "
                "model.new_cache()"
            )
        length = self.get_seq_length()
        new = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        first = max((layer.first for layer in self.keepers), default=0)
        if not 0 <= new <= length:
            raise UnsupportedError(
                f"cannot crop a cache of {length} tokens to {new}; give at most {length}"
            )
        kept = [each for layer in self.layers for each in layer.kept.values()]
        has_dropped = any(
            layer.first > layer.first_seen_after(new) for layer in self.layers
        )
        if new < length and (
            has_dropped
            or not all(each.reaches_back(length - new, new) for each in kept)
        ):
            raise UnsupportedError(
                f"cannot crop to {new} tokens: windows have dropped what lies before {first}; call "
                "activate_past_recording() before"
            )
        # The tokens taken back may be held by any rank, so each rank removes a different number of rows.
        before = self.shares.counts()[self.rank]
        self._ids.cut(0, length - new)
        self.shares.crop(new)
        for layer in self.layers:
            layer.take_back(before - self.shares.counts()[self.rank])
            layer.length = min(layer.length, new)
            layer.forget()
        for each in kept:
            each.take_back(length - new, new)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens seen so far; in a pass they count from the layer that has read them."""
        layer = self.layers[layer_idx]
        if layer not in self.keepers:
            layer = next(iter(self.keepers), None)
        return self.shares.length if layer is None else layer.length

    def reset(self) -> None:
        self.shares, self._ids = Shares(self.shares.ranks), Rows()
        for layer in self.layers:
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        self._ids.change(lambda x: x[beam_idx.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._ids.change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._ids.change(lambda x: x[indices.cpu()])


def check_cache(cache: object) -> None:
    if isinstance(cache, RingCache):
        cache.check_complete()
    elif cache is not None:
        raise UnsupportedError(
            f"past_key_values is a {type(cache).__name__}, which is whole on one process; use model.new_cache()"
        )


def _layer(
    cache: RingCache, kind: LayerMask | None, states: int
) -> "RingLayer | StateLayer":
    if not states:
        return RingLayer(cache, kind)
    return StateLayer(states) if kind is None else RingStateLayer(cache, kind, states)


class RingLayer(Rearranged, CacheLayerMixin):
    """One rank's keys and values of one layer; with ``kind`` None it keeps nothing."""

    is_croppable = True
    is_compileable = False
    indexer_position_ids = property(lambda _: None, lambda _, positions: None)
    """Positions of all tokens, with which Qwen4-exp would rotate its pools again."""

    def __init__(self, cache: RingCache, kind: LayerMask | None) -> None:
        self._cache = cache
        self.kind = kind
        self.is_sliding = kind is not None and kind.window is not None
        super().__init__()
        self.reset()

    @property
    def keeps_all(self) -> bool:
        return self.kind is not None and self.kind.sees_all

    def reserve(self, count: int) -> None:
        self._reserved = count
        for rows in self.rows:
            rows.reserve(count)

    def reset(self) -> None:
        self.rows: tuple[Rows | QuantisedRows, ...] = (
            new_rows(self._cache.dtype),
            new_rows(self._cache.dtype),
        )
        """Keys, values, and the keys of an index; the last are never quantised, since rounding changes the choice."""
        self.kept.clear()
        self._reserved = 0
        # The tokens of the whole sequence that this layer has read, and the first position that any rank still holds.
        self.length = 0
        self.first = 0
        self.is_initialized = False
        self.keys = self.values = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep this rank's part of the new tokens; return its whole share. UnsupportedError outside a forward pass."""
        turn = current_turn()
        if turn is None:
            raise UnsupportedError(
                "a RingCache is for the model on the ring that made it; give others their own cache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        share = tuple(
            _added(*pair, turn)
            for pair in zip(self.rows, (key_states, value_states), strict=False)
        )
        self.length = turn.new.length
        # The share returned above still has these rows: this pass's first queries see keys that its last ones do not.
        if not self._cache.records_past:
            self.forget()
        self._show()
        return share  # pyright: ignore[reportReturnType]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Keep this rank's part of an index's new keys (B, n, D); return its whole share. ``update`` comes first."""
        turn = current_turn()
        assert turn is not None, "keys have been added"
        return _added(self._index_rows(), indexer_key_states[:, None], turn)[:, 0]

    def _index_rows(self) -> Rows | QuantisedRows:
        if len(self.rows) == 2:
            self.rows = (*self.rows, Rows())
            self.rows[2].reserve(self._reserved)
        return self.rows[2]

    def fill(self, parts: Sequence[Tensor], length: int, first: int) -> None:
        """Hold this rank's share, keys, values and keys of an index (B, G, M, D) each, from position ``first`` on."""
        self.lazy_initialization(*parts[:2])
        if len(parts) > 2:
            self._index_rows()
        for rows, new in zip(self.rows, parts, strict=True):
            rows.append(new)
        self.length, self.first = length, first
        self._cut(0, 0)

    def first_seen_after(self, length: int) -> int:
        """Return the first position visible to a token at ``length`` or later."""
        return 0 if self.kind is None else self.kind.first_seen_after(length)

    def forget(self) -> None:
        first = self.first_seen_after(self.length)
        if first > self.first:
            self._cut(self._held(self.first) - self._held(first), 0)
            self.first = first

    def take_back(self, count: int) -> None:
        self._cut(0, count)

    def _held(self, first: int) -> int:
        return self._cache.shares.counts(first)[self._cache.rank]

    def _cut(self, first: int, last: int) -> None:
        # A layer without keys of its own may hold an index's keys only, or nothing.
        for rows in self.rows:
            if held := rows.count:
                rows.cut(first, min(last, held))
        if self.is_initialized:
            self._show()

    def _show(self) -> None:
        self.keys, self.values = (rows.stored for rows in self.rows[:2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.kind is None or self.kind.window is None else self.kind.window

    # Earlier releases of transformers call it by this name.
    get_max_cache_shape = get_max_length

    crop = refusing(
        "layers of a RingCache are cropped together; call crop of the cache"
    )
    offload = refusing(
        "a RingCache is not offloaded; use a larger ring, or model.new_cache('int8')"
    )

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        for rows in self.rows:
            rows.change(function)
        self._cut(0, 0)


def _added(rows: Rows | QuantisedRows, new: Tensor, turn: Turn) -> Tensor:
    """Add this rank's part of the new tokens; return all of its rows, or one of padding (``Shares.held``)."""
    # A prompt is split before it reaches the layers. A few new tokens come to every rank, which picks its own.
    rows.append(new if turn.is_split else new.index_select(2, turn.kept.to(new.device)))
    return rows.tensor if rows.count else new[:, :, :1]


class RingStateLayer(StateLayer, RingLayer):
    """Layer with a state in addition to its attention (Falcon-H1)."""

    def __init__(self, cache: RingCache, kind: LayerMask, states: int) -> None:
        # ``reset``, which ``RingLayer.__init__`` calls, needs the number.
        self.number_of_states = states
        RingLayer.__init__(self, cache, kind)

    def reset(self) -> None:
        RingLayer.reset(self)
        StateLayer.reset(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (RingLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        RingLayer.change(self, function)
        StateLayer.change(self, function)

    get_max_length = RingLayer.get_max_length
