"""Forward passes with images: a tower computes this rank's share, and local embeddings come by an exchange."""

# B batch, S global tokens, T local tokens, N ranks, R embeddings of a batch, in token order.
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ringspan.core.geometry.layer_mask import Blocks
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.data.media.cuts import Inputs, pieces_of
from ringspan.torch.data.media.inputs import Media
from ringspan.torch.data.media.kind import Kind, Modality
from ringspan.torch.engine.transport.collectives import gather, gather_over
from ringspan.torch.mechanisms.media.checks import check_counts
from ringspan.torch.mechanisms.media.kinds import blocks_of, is_of
from ringspan.torch.model.layers.decoder import inner_of, layers_of
from ringspan.torch.model.layers.modules import mix_in
from ringspan.torch.model.layers.rope import set_global_length
from ringspan.torch.model.layers.view import ModelView, RingModel, decoder_on_ring
from ringspan.torch.model.memory.checkpointing import checkpoint_all


def put_towers_on_ring(
    view: ModelView, kind: Kind, *, checkpointed: bool
) -> list[nn.Module]:
    """Make towers compute their rank's share, in place; return their layers, each to be gathered by itself.

    If ``checkpointed``, layers that support it are recomputed in backward.
    """
    for modality in kind.modalities if kind.features is None else ():
        mix_in(view.inner, _MIXINS[modality.name])
    layers: list[nn.Module] = []
    for tower in view.towers:
        layers += layers_of(tower).values()
        if checkpointed and tower.supports_gradient_checkpointing:
            checkpoint_all(tower, {"use_reentrant": False})
    return layers


class Work(NamedTuple):
    modality: Modality
    inputs: Inputs  # inputs of the whole batch
    units: range
    is_counted: bool
    """False if the output is discarded: a rank without a share runs too, since all ranks gather weights together."""


class Made(NamedTuple):
    output: Any
    rows: Tensor  # embeddings, each with its additions in deeper layers (R, C + ...)
    widths: list[int]
    counts: list[int]  # count per unit, or per piece of the tower's output

    def placed(self, rows: Tensor) -> Any:
        first, *deeper = rows.split(self.widths, -1)
        self.output.pooler_output = _as(self.output.pooler_output, first)
        if deeper:
            before = self.output.deepstack_features
            self.output.deepstack_features = [
                _as(old, new) for old, new in zip(before, deeper, strict=True)
            ]
        return self.output


def _as(before: object, rows: Tensor) -> object:
    if not isinstance(before, Tensor):
        return [rows]
    return rows[None] if before.ndim == 3 else rows


def cheapest_of(modality: Modality, inputs: Inputs) -> range:
    costs = modality.cut.costs(inputs)
    unit = min(range(len(costs)), key=costs.__getitem__)
    return range(unit, unit + 1)


class SharedTowers:
    def __init__(self, model: RingModel) -> None:
        self.model, self.kind = model, model.ring_media
        ring: DeviceMesh = model.ring_axis
        self.group, self.rank, self.ranks = (
            ring.get_group(),
            ring.get_local_rank(),
            ring.size(),
        )
        self.works: dict[str, Work] = {}

    def add(self, modality: Modality, inputs: Inputs, *, is_counted: bool) -> None:
        """Share out inputs of the whole batch, or run the cheapest and discard it."""
        inputs = modality.cut.given(inputs)
        share = (
            share_out(modality.cut.costs(inputs), self.ranks)[self.rank]
            if is_counted
            else range(0)
        )
        self.works[modality.name] = Work(
            modality, inputs, share or cheapest_of(modality, inputs), bool(share)
        )

    def make(self, work: Work, compute: Callable[..., Any]) -> Made:
        """Run a tower on this rank's units and return its output with the embeddings as rows.

        Additions to deeper layers are further columns of the rows. Work that is not counted has no rows.
        """
        device = next(iter(self.model.get_input_embeddings().parameters())).device
        taken = {
            name: part.to(device)
            for name, part in work.modality.cut.take(work.inputs, work.units).items()
        }
        output = compute(**taken, return_dict=True)
        pieces = work.modality.cut.rows(output.pooler_output, work.inputs, work.units)
        deeper = [
            torch.cat(pieces_of(each))
            for each in getattr(output, "deepstack_features", None) or ()
        ]
        parts = [torch.cat(pieces), *deeper]
        rows = torch.cat(parts, -1)
        if not work.is_counted:
            rows, pieces = rows[:0], []
        return Made(
            output,
            rows,
            [part.shape[-1] for part in parts],
            [len(piece) for piece in pieces],
        )

    def counted(self, work: Work, made: Made, wanted: list[int]) -> list[int]:
        """Return each rank's number of embeddings; UnsupportedError on all if placeholders differ."""
        by_rank = torch.zeros(self.ranks, dtype=torch.int64, device=made.rows.device)
        by_rank[self.rank] = len(made.rows)
        dist.all_reduce(by_rank, group=self.group)
        if int(by_rank.sum()) != sum(wanted):
            told: list[list[int]] = gather(made.counts, self.group)
            check_counts(
                work.modality, [number for each in told for number in each], wanted
            )
        return by_rank.tolist()

    def features(self, name: str, compute: Callable[..., Any]) -> object:
        raise NotImplementedError

    @contextmanager
    def active(self) -> Iterator[PreTrainedModel]:
        inner = inner_of(self.model)
        vars(inner)["ring_pass"] = self
        try:
            yield inner
        finally:
            vars(inner).pop("ring_pass", None)

    def asked(self, inner: PreTrainedModel, name: str) -> Any:
        if self.kind.features is None:
            return getattr(inner, f"get_{name}_features")()
        return self.features(name, partial(self.kind.features, inner))

    def decoded(self, given: dict[str, Any]) -> BaseModelOutput:
        """Run the decoder on tokens with the embeddings of media in place.

        The model's own forward does it, given empty pixels; for a model without tower methods, it is done here.
        """
        ids = given["input_ids"]
        # The model asks for embeddings if it is given pixels, even empty ones.
        with self.active() as inner:
            if self.kind.features is None:
                return inner(
                    **given
                    | {
                        work.modality.cut.pixels: ids.new_empty(0)
                        for work in self.works.values()
                    }
                )
            embedded = self.model.get_input_embeddings()(ids)
            for name, work in self.works.items():
                rows = self.asked(inner, name).pooler_output.to(embedded)
                embedded = embedded.masked_scatter(
                    is_of(self.model, work.modality, ids)[..., None], rows
                )
        others = {name: value for name, value in given.items() if name != "input_ids"}
        return decoder_on_ring(self.model)(inputs_embeds=embedded, **others)


class MediaPass(SharedTowers):
    """Images of one batch in a pass of a model; ``inputs`` may be another replica's."""

    def __init__(
        self,
        model: RingModel,
        media: Media | None,
        inputs: Mapping[str, Inputs],
        split: BatchLayout,
        lengths: Tensor | None,
    ) -> None:
        super().__init__(model)
        self.media, self.split, self.lengths = media, split, lengths
        for modality in self.kind.modalities:
            if modality.name in inputs:
                is_own = media is not None and modality.cut.pixels in media.inputs
                self.add(modality, inputs[modality.name], is_counted=is_own)

    def decode(self, given: dict[str, Any]) -> BaseModelOutput:
        """Run the decoder on local tokens.

        For grid positions, add each token's time, row and column to its position.
        """
        device = given["input_ids"].device
        positions = given["position_ids"]
        if self.kind.has_grid_positions and self.media is not None:
            grid: Tensor = self.media.found["positions"]
            set_global_length(decoder_on_ring(self.model), int(grid.max()) + 1)
            split = BatchLayout.of(
                self.model.ring_layout, grid.shape[-1], self.ranks, self.lengths
            )
            local = (
                split.shard(grid.permute(1, 2, 0), self.rank)
                .permute(2, 0, 1)
                .to(device)
            )
            positions = torch.cat(
                (positions[None].to(local).expand(1, *local.shape[1:]), local)
            )
        return self.decoded(given | {"position_ids": positions})

    def features(self, name: str, compute: Callable[..., Any]) -> object:
        """Return a tower's output with the local tokens' embeddings; raise as ``counted``."""
        work = self.works[name]
        places, wanted = torch.empty(0, 2, dtype=torch.int64), [0]
        if self.media is not None and work.modality.cut.pixels in self.media.inputs:
            there = is_of(self.model, work.modality, self.media.tokens)
            places, wanted = there.nonzero(), there.sum(1).tolist()
        made = self.make(work, compute)
        plan = make_plan(
            places.numpy(), self.split, self.rank, self.counted(work, made, wanted)
        )
        return made.placed(exchange(made.rows, plan, self.group))


def find_pass(
    model: RingModel, media: Media | None, tokens: int, lengths: Tensor | None
) -> MediaPass | None:
    """Return the pass of a batch's images for ``tokens`` local tokens; None if no replica has images."""
    # All replicas run the same towers, since gradients are summed: one without images runs the smallest of another.
    kind: Kind | None = model.ring_media
    if kind is None:
        return None
    own = {} if media is None else media.inputs
    inputs: dict[str, Inputs] = {
        each.name: each.cut.given(own)
        for each in kind.modalities
        if each.cut.pixels in own
    }
    if model.ring_mesh.get_group("replicate").size() > 1:
        inputs = _with_replicas(model.ring_mesh, kind, inputs)
    if not inputs and (media is None or not kind.has_grid_positions):
        return None
    ring = model.ring_axis
    split = BatchLayout.of(
        model.ring_layout, ring.size() * tokens, ring.size(), lengths
    )
    return MediaPass(model, media, inputs, split, lengths)


def _with_replicas(
    mesh: DeviceMesh, kind: Kind, inputs: dict[str, Inputs]
) -> dict[str, Inputs]:
    """Return inputs of each modality that some replica has: this one's own, or the cheapest unit of another's."""
    total = torch.tensor(
        [each.name in inputs for each in kind.modalities],
        dtype=torch.int64,
        device=mesh.device_type,
    )
    dist.all_reduce(total, group=mesh.get_group("replicate"))
    for modality, replicas in zip(kind.modalities, total.tolist(), strict=True):
        if replicas in (0, mesh.get_group("replicate").size()):
            continue
        mine = None
        if modality.name in inputs:
            mine = modality.cut.take(
                inputs[modality.name], cheapest_of(modality, inputs[modality.name])
            )
        offered = gather_over(mesh, mine, ["replicate"])
        if mine is None:
            inputs = inputs | {
                modality.name: next(each for each in offered if each is not None)
            }
    return inputs


class RingTowers(nn.Module):
    ring_pass: SharedTowers | None = None

    def inputs_merger(
        self: Any, input_ids: Tensor, inputs_embeds: Tensor, image_hidden_states: Tensor
    ) -> Tensor:
        """Replace Idefics' method before transformers 5.2x, which counts whole images per sequence."""
        places = (input_ids == self.config.image_token_id)[..., None]
        return inputs_embeds.masked_scatter(
            places, image_hidden_states.to(inputs_embeds)
        )


def _features(
    inner: object,
    name: str,
    compute: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    # Without a pass it is a user's own call, or a tower's method that another one calls.
    current: SharedTowers | None = vars(inner).pop("ring_pass", None)
    if current is None:
        return compute(*args, **kwargs)
    try:
        return current.features(name, compute)
    finally:
        vars(inner)["ring_pass"] = current


def _mixin(name: str) -> type[RingTowers]:
    method = f"get_{name}_features"

    def features(self: Any, *args: object, **kwargs: object) -> object:
        return _features(self, name, getattr(super(mixin, self), method), args, kwargs)

    mixin = type(f"_Towers_{name}", (RingTowers,), {method: features})
    return mixin


_MIXINS: Final = {name: _mixin(name) for name in ("audio", "image", "video")}


class PromptImages(SharedTowers):
    """Images of a prompt of ``rows`` and ``count`` new tokens over a cache, the same on every rank."""

    def __init__(self, model: RingModel, media: Media, rows: int, count: int) -> None:
        """Compute a prompt's embeddings once: each rank runs its share, and every rank keeps all rows."""
        super().__init__(model)
        self.media, self._repeats = media, rows // len(media)
        self._behind = count - media.tokens.shape[1]
        blocks = blocks_of(self.kind, media, None)
        self.blocks: list[Blocks] | None = blocks and [
            row for row in blocks for _ in range(self._repeats)
        ]
        """Runs of tokens in each sequence that see each other in both directions."""
        self._made: dict[str, Made] = {}
        self._columns: Tensor | None = None  # new tokens that are read now
        for modality in self.kind.modalities:
            if modality.cut.pixels in media.inputs:
                self.add(modality, media.inputs, is_counted=True)
                with self.active() as inner:
                    self.asked(inner, modality.name)

    def features(self, name: str, compute: Callable[..., Any]) -> object:
        """Compute and keep all embeddings on the first call; later return the ones for tokens being read."""
        work = self.works[name]
        places = is_of(self.model, work.modality, self.media.tokens)
        if name not in self._made:
            made = self.make(work, compute)
            by_rank = self.counted(work, made, places.sum(1).tolist())
            parts = [
                made.rows.new_empty((count, made.rows.shape[1])) for count in by_rank
            ]
            parts[self.rank] = made.rows
            for rank, part in enumerate(parts):
                dist.broadcast(part, group_src=rank, group=self.group)
            self._made[name] = made._replace(rows=torch.cat(parts))
            return made.output
        assert self._columns is not None, "a turn says which"
        made = self._made[name]
        numbers = (
            (places.flatten().cumsum(0) - 1).view(places.shape).masked_fill(~places, -1)
        )
        numbers = pad(numbers, (0, self._behind), value=-1)[
            :, self._columns
        ].repeat_interleave(self._repeats, 0)
        wanted = numbers[numbers >= 0]
        return made.placed(made.rows[wanted.to(made.rows.device)])

    def read(self, columns: Tensor, given: dict[str, Any]) -> BaseModelOutput:
        """Run the model below the head on these new tokens, with images in place."""
        self._columns = columns
        return self.decoded(given)


Integers = NDArray[np.int64]


def share_out(costs: Sequence[int], ranks: int) -> list[range]:
    """Assign consecutive units to ranks at about equal cost: a unit belongs to the rank at the middle of its cost."""
    ends = np.cumsum(np.array(costs, dtype=np.float64))
    total = float(ends[-1]) if len(costs) else 0.0
    owners = (
        ((ends - np.array(costs) / 2) * ranks / (total or 1.0))
        .astype(np.int64)
        .clip(max=ranks - 1)
    )
    bounds = np.searchsorted(owners, np.arange(ranks + 1)).tolist()
    return [range(bounds[rank], bounds[rank + 1]) for rank in range(ranks)]


class Plan(NamedTuple):
    sent: Tensor  # indices of its own embeddings, rank by rank
    send_counts: list[int]
    receive_counts: list[int]
    order: Tensor  # indices of received embeddings, in the order of local tokens (B, T)


def make_plan(
    places: Integers, split: BatchLayout, rank: int, made: Sequence[int]
) -> Plan:
    """Plan one rank's exchange: ``places`` (R, 2) of all embeddings are sorted (sequence, position)."""
    ranks, tokens = split.shared.ranks, split.shared.tokens_per_rank
    tables = np.stack([layout.inverse for layout in split.rows])
    stored = tables[places[:, 0] if len(tables) > 1 else 0, places[:, 1]]
    holders, local = stored // tokens, places[:, 0] * tokens + stored % tokens
    owners = np.repeat(np.arange(ranks), made)
    first = sum(made[:rank])
    mine = slice(first, first + made[rank])
    here = holders == rank
    arriving = np.lexsort((local[here], owners[here]))
    return Plan(
        torch.from_numpy(np.lexsort((local[mine], holders[mine]))),
        np.bincount(holders[mine], minlength=ranks).tolist(),
        np.bincount(owners[here], minlength=ranks).tolist(),
        torch.from_numpy(np.argsort(local[here][arriving])),
    )


def exchange(rows: Tensor, plan: Plan, group: dist.ProcessGroup) -> Tensor:
    """Return the local tokens' embeddings in order; gradients go back to their makers."""
    sent = rows.index_select(0, plan.sent.to(rows.device))
    if dist.get_world_size(group) > 1:
        sent = _Exchanged.apply(sent, plan.send_counts, plan.receive_counts, group)
    return sent.index_select(0, plan.order.to(rows.device))


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send: list[int],
        receive: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _traded(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _traded(gradients[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _traded(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty((sum(receive), rows.shape[1]))
    # Sent as bytes, because not every backend sends every dtype.
    dist.all_to_all_single(
        received.view(torch.uint8),
        rows.contiguous().view(torch.uint8),
        receive,
        send,
        group=group,
    )
    return received
