"""A stateful layer over the spans of a ring: compute each span's map, scan the maps, compute with the states.

Spans that take a state run twice: from zero, to find their map, then from that state. In backward, outputs first give
each span's part of its state's gradient; these are scanned from the last span on, then inputs' gradients follow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from ringspan.core.errors import UnsupportedError
from ringspan.torch.engine.recurrence.current import Record, SequencePass
from ringspan.torch.engine.recurrence.exchange import (
    Entry,
    halo_backward,
    halo_of,
    scan_states,
)
from ringspan.torch.engine.recurrence.plan import LocalPiece, Plan, as_text, plan_of
from ringspan.torch.engine.recurrence.rules import (
    Arguments,
    Function,
    Rule,
    state_dtype,
)
from ringspan.torch.runtime.autocast import autocast_now

# Functions that have been tried and do take and return states.
_STATEFUL: Final[set[Function]] = set()


def refuse_stateless(rule: Rule, function: Function, arguments: Arguments) -> None:
    """Raise UnsupportedError on every rank for a function that ignores its initial state or returns no final one."""
    # transformers silently drops arguments that a kernel library lacks, so each function is tried once, on one token.
    part = dict(arguments)
    if function in _STATEFUL or any(isinstance(x, FakeTensor) for x in part.values()):
        return
    for name, dim in rule.dims.items():
        if isinstance(part.get(name), Tensor):
            part[name] = part[name][:1].narrow(dim, 0, 1)
    first = part[next(iter(rule.dims))]
    # So large that even the strongest decay leaves a visible part.
    large = torch.full(
        rule.shapes(part)[1], 1e20, dtype=state_dtype(first.dtype), device=first.device
    )
    try:
        with torch.no_grad():
            ends = [rule.run(function, part, state)[1] for state in (None, large)]
        takes_states = all(isinstance(end, Tensor) for end in ends) and not torch.equal(
            *ends
        )
    except (IndexError, TypeError, ValueError):
        takes_states = False
    if not takes_states:
        name = getattr(function, "__name__", type(function).__name__)
        raise UnsupportedError(
            f"{name} neither begins with a given state nor returns its last one ({', '.join(rule.states)}), without "
            "which a sequence cannot be split; update the kernel library that it is from, or uninstall it"
        )
    _STATEFUL.add(function)


@torch.compiler.disable()
def recurrence(
    rule: Rule,
    function: Function,
    arguments: Mapping[str, Any],
    sequences: SequencePass,
) -> Tensor:
    """Compute ``function(**arguments)`` on the whole sequence, each document separately, for local tokens.

    Differentiable.
    """
    parts = sequences.of_rows()
    if len(parts) > 1:
        return _joined(
            [
                recurrence(rule, function, _only(rows, rule, arguments), part)
                for rows, part in parts
            ],
            0,
        )
    job = _Job.of(rule, function, arguments, sequences)
    if not job.plan.rounds and sequences.part is None:
        return torch.cat(
            [job.run(job.arguments, number, None)[0] for number in job.mine],
            rule.out_dim,
        )
    refuse_stateless(rule, function, job.arguments)
    names = [name for name, x in arguments.items() if isinstance(x, Tensor)]
    entry = Entry.of(job.plan, sequences)
    # A checkpoint frees only saved tensors, so the job does not hold them.
    job = replace(job, arguments=job.arguments | dict.fromkeys(names))
    return _Recurrence.apply(
        job, names, sequences.record, entry, *(arguments[name] for name in names)
    )


@torch.compiler.disable()
def resumed(
    rule: Rule,
    function: Function,
    arguments: Mapping[str, Any],
    sequences: SequencePass,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return ``recurrence`` from an initial state and the final state, both equal on every rank; not differentiable."""
    job = _Job.of(rule, function, arguments, sequences)
    refuse_stateless(rule, function, job.arguments)
    with torch.no_grad():
        outs, _, _, ends = job.spans(job.arguments, state)
        last = len(job.plan.places) - 1
        first = next(arguments[name] for name in rule.dims)
        shape, dtype = rule.shapes(job.arguments)[1], state_dtype(first.dtype)
        if (end := ends.get(last)) is None:
            end = torch.empty(shape, dtype=dtype, device=first.device)
        end = end.to(dtype).contiguous()
        if job.plan.layout.ranks > 1:
            dist.broadcast(
                end, group_src=job.plan.places[last].rank, group=sequences.group
            )
    return torch.cat([outs[number] for number in job.mine], rule.out_dim), end


@dataclass(frozen=True)
class _Job:
    rule: Rule
    function: Function
    arguments: dict[str, Any]
    plan: Plan
    mine: tuple[int, ...]
    text: str

    @classmethod
    def of(
        cls,
        rule: Rule,
        function: Function,
        arguments: Arguments,
        sequences: SequencePass,
    ) -> "_Job":
        plan = plan_of(sequences.layouts[0], sequences.starts)
        rank = dist.get_rank(sequences.group) if sequences.group is not None else 0
        text = as_text(plan.layout, sequences.starts, sequences.group)
        return cls(rule, function, dict(arguments), plan, plan.mine(rank), text)

    def run(
        self, arguments: Arguments, number: int, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs and the final state of a span that begins with ``state``, or zero for None.

        Each document in the span is computed by itself; only one that continues from the span before begins with
        ``state``.
        """
        outs: list[Tensor] = []
        ends: list[Tensor] = []
        first = self.plan.places[0].offset if number == 0 else -1
        for rows, starts in self.plan.rows():
            made: list[Tensor] = []
            end = None
            for piece in self.plan.pieces(number, starts):
                is_taken = piece.continues or piece.start == first
                begin = state[rows] if is_taken and state is not None else None
                out, end = self.rule.run(
                    self.function, self._part(arguments, rows, piece), begin
                )
                made.append(out)
            assert end is not None, "a span has tokens"
            outs.append(_joined(made, self.rule.out_dim))
            ends.append(end)
        return _joined(outs, 0), _joined(ends, 0)

    def map_of(self, arguments: Arguments, number: int) -> tuple[Tensor, Tensor]:
        """Return A and B of a span's map from initial to final state."""
        maps: list[Tensor] = []
        states: list[Tensor] = []
        for rows, starts in self.plan.rows():
            *_, last = self.plan.pieces(number, starts)
            part = self._part(arguments, rows, last)
            if self.plan.passes(number, starts):
                a, b = self.rule.map_of(self.function, part)
            else:
                _, b = self.rule.run(self.function, part, None)
                a = b.new_zeros(self.rule.shapes(part)[0])
            maps.append(a)
            states.append(b)
        return _joined(maps, 0), _joined(states, 0)

    def _part(
        self, arguments: Arguments, rows: slice, piece: LocalPiece
    ) -> dict[str, Any]:
        part = dict(arguments)
        for name, dim in self.rule.dims.items():
            x = part.get(name)
            if isinstance(x, Tensor):
                part[name] = x[rows].narrow(dim, piece.start, piece.stop - piece.start)
        return part

    def with_tensors(
        self, names: list[str], tensors: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        return {**self.arguments, **dict(zip(names, tensors, strict=True))}

    def forward(
        self, arguments: Arguments, entry: Entry | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        outs, taken, maps, ends = self.spans(
            arguments, None if entry is None else entry.read()
        )
        if entry is not None:
            end = ends.get(len(self.plan.places) - 1)
            entry.write(
                torch.zeros_like(taken[0]) if end is None else end.to(taken.dtype)
            )
        return (
            torch.cat([outs[number] for number in self.mine], self.rule.out_dim),
            taken,
            maps,
        )

    def spans(
        self, arguments: Arguments, begin: Tensor | None = None
    ) -> tuple[dict[int, Tensor], Tensor, Tensor, dict[int, Tensor]]:
        """Return outputs, initial states and A of local spans, and known final states; ``begin`` None is zero."""
        outs: dict[int, Tensor] = {}
        ends: dict[int, Tensor] = {}
        maps: list[Tensor] = []
        states: list[Tensor] = []
        first = next(arguments[name] for name in self.rule.dims)
        shapes = self.rule.shapes(arguments)
        dtype = state_dtype(first.dtype)
        for number in self.mine:
            a, b = (
                torch.zeros(shape, dtype=dtype, device=first.device) for shape in shapes
            )
            if not self.plan.takes(number):
                outs[number], b = self.run(
                    arguments, number, begin if number == 0 else None
                )
                ends[number] = b
            elif self.plan.is_taken(number):
                a, b = self.map_of(arguments, number)
            maps.append(a.to(dtype))
            states.append(b.to(dtype))
        stacked, taken = torch.stack(maps), torch.stack(states)
        if self.plan.rounds:
            taken = scan_states(stacked, taken, self.text, self.rule.is_matrix, False)
        for state, number in zip(taken, self.mine, strict=True):
            if number not in outs:
                outs[number], ends[number] = self.run(arguments, number, state)
        return outs, taken, stacked, ends

    def backward(
        self,
        arguments: Arguments,
        leaves: list[Tensor],
        dout: Tensor,
        taken: Tensor,
        maps: Tensor,
        entry: Entry | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``leaves``, given the gradient of local outputs.

        Spans are computed again from their initial states ``taken``. Outputs give each state's own gradient; scanned
        backwards through ``maps``, these give the gradients of final states; both together give the inputs' gradients.
        With an ``entry``, gradients of the state also come from the next fold and go to the one before.
        """
        begin, later = None, None
        if entry is not None:
            begin, later = entry.read(), entry.read_gradient()
        own = [begin] if begin is not None and 0 in self.mine else []
        states = self._leaves_of(taken, own)
        with torch.enable_grad():
            made = [
                self.run(arguments, number, state)
                for number, state in zip(self.mine, states, strict=True)
            ]
        outs, ends = [out for out, _ in made], [end for _, end in made]
        douts = dout.split(
            [self.plan.places[number].tokens for number in self.mine], self.rule.out_dim
        )
        gammas = torch.zeros_like(taken)
        for index, gamma in self._own_gradients(states, made, douts, later):
            gammas[index] = gamma
        dends = (
            scan_states(maps, gammas, self.text, self.rule.is_matrix, True)
            if self.plan.rounds
            else gammas
        )
        of_ends = self._gradients_of_ends(ends, dends, later)
        results = [*outs, *(end for end, _ in of_ends)]
        gradients = [*douts, *(dend for _, dend in of_ends)]
        found = torch.autograd.grad(
            results, [*leaves, *own], gradients, allow_unused=True
        )
        if entry is not None and begin is not None:
            entry.write_gradient(found[-1] if own else torch.zeros_like(begin))
        return found[: len(leaves)]

    def _leaves_of(self, taken: Tensor, own: list[Tensor]) -> list[Tensor | None]:
        """Return each local span's initial state, to differentiate by: another span's, the fold's own, or None."""
        states = [
            state.detach().requires_grad_() if self.plan.takes(number) else None
            for state, number in zip(taken, self.mine, strict=True)
        ]
        for state in own:
            states[self.mine.index(0)] = state.requires_grad_()
        return states

    def _own_gradients(
        self,
        states: list[Tensor | None],
        made: list[tuple[Tensor, Tensor]],
        douts: Sequence[Tensor],
        later: Tensor | None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the gradient that a span's outputs, and the next fold, have by each state that another span gave."""
        last = len(self.plan.places) - 1
        for index, (number, state) in enumerate(zip(self.mine, states, strict=True)):
            if state is None or not self.plan.takes(number):
                continue
            out, end = made[index]
            results, gradients = [out], [douts[index]]
            if later is not None and number == last:
                results.append(end)
                gradients.append(later.to(end.dtype))
            [gradient] = torch.autograd.grad(
                results, state, gradients, retain_graph=True
            )
            yield index, gradient

    def _gradients_of_ends(
        self, ends: list[Tensor], dends: Tensor, later: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return final states with their gradients, from the next span or the next fold."""
        found = [
            (end, dend.to(end.dtype))
            for end, dend, number in zip(ends, dends, self.mine, strict=True)
            if self.plan.is_taken(number)
        ]
        last = len(self.plan.places) - 1
        if later is not None and last in self.mine:
            end = ends[self.mine.index(last)]
            found.append((end, later.to(end.dtype)))
        return found


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        job: _Job,
        names: list[str],
        record: Record | None,
        entry: Entry | None,
        *tensors: Tensor,
    ) -> Tensor:
        """Compute local outputs, or take a recorded result; save the inputs, initial states and maps for backward."""

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            return job.forward(job.with_tensors(names, tensors), entry)

        out, taken, maps = compute() if record is None else record.made(compute)
        ctx.job, ctx.names, ctx.entry = job, names, entry
        kind = tensors[0].device.type
        ctx.autocast = autocast_now(kind)
        ctx.save_for_backward(*tensors, taken, maps)
        return out.view_as(out) if record is not None else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return gradients of the tensors that need one, by ``_Job.backward`` under forward's autocast."""
        *tensors, taken, maps = ctx.saved_tensors
        job: _Job = ctx.job
        wanted = ctx.needs_input_grad[4:]
        inputs = tuple(
            x.detach().requires_grad_(want)
            for x, want in zip(tensors, wanted, strict=True)
        )
        leaves = [x for x in inputs if x.requires_grad]
        with ctx.autocast():
            found = iter(
                job.backward(
                    job.with_tensors(ctx.names, inputs),
                    leaves,
                    gradients[0],
                    taken,
                    maps,
                    ctx.entry,
                )
            )
        return (
            None,
            None,
            None,
            None,
            *(next(found) if want else None for want in wanted),
        )


@torch.compiler.disable()
def convolution(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, sequences: SequencePass,
    **options: object,
) -> Tensor:  # fmt: skip
    """Compute a causal convolution of local tokens, for each document separately; differentiable and collective."""
    # ``function(x, weight, bias, **options)`` computes it for consecutive tokens, with zeros before the first; x
    # (B, C, T), weight (C, K). In a pass over a cache, the inputs that it holds come before the first token.
    parts = sequences.of_rows()
    if len(parts) > 1:
        return _joined(
            [
                convolution(function, x[rows], weight, bias, part, **options)
                for rows, part in parts
            ],
            0,
        )
    plan, width = plan_of(sequences.layouts[0], sequences.starts), weight.shape[-1] - 1
    mine = plan.mine(
        dist.get_rank(sequences.group) if sequences.group is not None else 0
    )
    before = None if sequences.before is None else sequences.before.inputs
    if width and (entry := Entry.of(plan, sequences, width)):
        x, before = _Entered.apply(x, entry, _last_inputs(plan, mine, width))
    halos = None
    if width and plan.loans(width):
        text = as_text(plan.layout, sequences.starts, sequences.group)
        x, halos = _Halo.apply(x, width, text, sequences.record)
    inputs = _Inputs(plan, x, halos, before, width)
    convolved: list[Tensor] = []
    for rows, starts in plan.rows():
        outs: list[Tensor] = []
        for index, number in enumerate(mine):
            for piece in plan.pieces(number, starts):
                whole, reach = inputs.of(rows, starts, index, number, piece)
                outs.append(function(whole, weight, bias, **options)[..., reach:])
        convolved.append(_joined(outs, -1))
    return _joined(convolved, 0)


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a convolution: local ones, those that spans lend (n, B, C, K - 1), and those before the first token."""

    plan: Plan
    x: Tensor
    halos: Tensor | None
    before: Tensor | None
    width: int

    def of(
        self,
        rows: slice,
        starts: tuple[int, ...],
        index: int,
        number: int,
        piece: LocalPiece,
    ) -> tuple[Tensor, int]:
        """Return a piece's inputs after those that it reaches back to, and the number of these."""
        plan, width = self.plan, self.width
        parts = [self.x[rows, :, piece.start : piece.stop]]
        reach = plan.reach_back(number, width, starts) if piece.continues else 0
        if reach:
            assert self.halos is not None, "the span before lends it"
            # Near the first token, fewer inputs are lent, and those before it come from a cache.
            parts.insert(0, self.halos[index, rows, :, width - reach :])
        if (
            self.before is not None
            and reach < width
            and plan.is_entered(number, piece, starts)
        ):
            first = self.before.shape[-1] - (width - reach)
            parts.insert(0, self.before[rows, :, first:])
            reach = width
        return _joined(parts, -1), reach


def _last_inputs(
    plan: Plan, mine: tuple[int, ...], width: int
) -> list[tuple[slice, slice]]:
    """Return slices of a fold's last ``width`` inputs: local tokens, and their places among these inputs."""
    first = plan.places[-1].end - width
    if first < plan.places[0].start:
        raise UnsupportedError(
            f"folds of fewer than {width} tokens, which a convolution reaches back; use fewer folds"
        )
    found: list[tuple[slice, slice]] = []
    for place in (plan.places[number] for number in mine):
        start, end = max(place.start, first), place.end
        if start < end:
            here = place.offset - place.start
            found.append(
                (slice(start + here, end + here), slice(start - first, end - first))
            )
    return found


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, entry: Entry, last: list[tuple[slice, slice]]
    ) -> tuple[Tensor, Tensor]:
        ctx.entry, ctx.last = entry, last
        mine = x.new_zeros(*x.shape[:-1], entry.width)
        for here, there in last:
            mine[..., there] = x[..., here]
        entry.write(mine)
        before = entry.read()
        return x.view_as(x), torch.zeros_like(mine) if before is None else before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx, dbefore = gradients
        ctx.entry.write_gradient(dbefore)
        later = ctx.entry.read_gradient()
        if later is not None:
            dx = dx.clone()
            for here, there in ctx.last:
                dx[..., here] += later[..., there]
        return dx, None, None


class _Halo(torch.autograd.Function):
    """Inputs and local halos; the inputs pass through, so that a rank that lends takes part in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, width: int, text: str, record: Record | None
    ) -> tuple[Tensor, Tensor]:
        ctx.width, ctx.tokens, ctx.text = width, x.shape[-1], text
        if record is None:
            return x.view_as(x), halo_of(x, width, text)
        (halo,) = record.made(lambda: (halo_of(x, width, text),))
        return x.view_as(x), halo.view_as(halo)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx, dhalo = gradients
        return (
            dx + halo_backward(dhalo.contiguous(), ctx.width, ctx.tokens, ctx.text),
            None,
            None,
            None,
        )


def _only(rows: slice, rule: Rule, arguments: Arguments) -> dict[str, Any]:
    return {
        name: x[rows] if name in rule.dims and isinstance(x, Tensor) else x
        for name, x in arguments.items()
    }


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
