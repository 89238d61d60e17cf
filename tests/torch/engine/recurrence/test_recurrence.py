"""Layers with a state, and convolutions, over spans: against float64 oracles of each document, gradients included.

One rank may hold any number of spans, so most of it needs no other one.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.geometry.tree import Tree
from ringspan.torch.engine.recurrence.current import (
    SequencePass,
    current_pass,
    passing,
)
from ringspan.torch.engine.recurrence.exchange import lend, scan
from ringspan.torch.engine.recurrence.plan import plan_of
from ringspan.torch.engine.recurrence.recurrence import convolution, recurrence
from ringspan.torch.engine.transport.exchange import COUNTERS
from ringspan.torch.model.layers.switches import Switches
from ringspan.torch.model.memory.carrying import carried
from tests import cases
from tests.core.geometry.test_tree import trees
from tests.core.recurrence.reference import causal_convolution
from tests.torch.engine.recurrence.layers import LAYERS, inputs
from tests.torch.engine.recurrence.models import module_of
from tests.torch.models import relative
from tests.torch.virtual import on_ranks


def spans_of(lengths: list[int]) -> CustomLayout:
    """Spans of such lengths, all on one rank."""
    ends = np.cumsum([0, *lengths]).tolist()
    return CustomLayout.of([list(zip(ends, lengths, strict=False))])


@st.composite
def cut_sequences(draw, most_tokens=40):
    """Lengths of spans, and where documents begin in each of some sequences."""
    lengths = draw(
        st.lists(st.integers(1, 12), min_size=1, max_size=6).filter(
            lambda each: sum(each) <= most_tokens
        )
    )
    tokens = sum(lengths)
    starts = st.lists(st.integers(0, tokens - 1), max_size=4).map(
        lambda each: tuple(sorted({0, *each}))
    )
    return lengths, tuple(draw(st.lists(starts, min_size=1, max_size=3)))


def parts(
    arguments: dict[str, Any], dims: Any, row: slice, a: int, b: int
) -> dict[str, Any]:
    """The arguments of tokens a to b of some sequences."""
    return {
        name: x[row].narrow(dims[name], a, b - a)
        if name in dims and isinstance(x, Tensor)
        else x
        for name, x in arguments.items()
    }


def by_document(
    compute: Any,
    arguments: Any,
    dims: Any,
    out_dim: int,
    starts: Any,
    rows: int,
    tokens: int,
) -> Tensor:
    """``compute`` of each document of each sequence, put together."""
    sequences = []
    for row, begins in enumerate(starts * rows if len(starts) == 1 else starts):
        each = (
            parts(arguments, dims, slice(row, row + 1), a, b)
            for a, b in pairwise((*begins, tokens))
        )
        sequences.append(
            torch.cat([torch.as_tensor(compute(part)) for part in each], out_dim)
        )
    return torch.cat(sequences)


# A decay of each channel takes the oracle longest; models of it are tried beside.
SLOWEST = "kimi delta attention"
NAMES = [*(name for name in LAYERS if name != SLOWEST), *cases.long(SLOWEST)]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(data=st.data())
def test_spans_compute_what_the_oracle_computes_of_each_document(name, data):
    lengths, starts = data.draw(cut_sequences())
    layer, tokens, rows = LAYERS[name], sum(lengths), max(2, len(starts))
    if len(starts) not in (1, rows):
        rows = len(starts)
    arguments = inputs(name, rows, tokens)
    function = layer.of(torch.float64)
    leaves = {
        key: x.requires_grad_() for key, x in arguments.items() if isinstance(x, Tensor)
    }
    out = recurrence(
        layer.rule,
        function,
        arguments,
        SequencePass((spans_of(lengths),), None, starts),
    )
    weights = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype
    )
    found = torch.autograd.grad((out * weights).sum(), list(leaves.values()))

    def alone(part: dict[str, Any]) -> Tensor:
        return layer.rule.run(function, part, None)[0]

    where = layer.rule.dims, layer.rule.out_dim, starts, rows, tokens
    whole = by_document(alone, arguments, *where)
    expected = torch.autograd.grad((whole * weights).sum(), list(leaves.values()))
    plain = {
        key: x.detach() if isinstance(x, Tensor) else x for key, x in arguments.items()
    }
    oracle = by_document(lambda part: layer.oracle(part)[0], plain, *where)
    assert relative(out, oracle) < 1e-10
    for key, gradient, truth in zip(leaves, found, expected, strict=True):
        assert relative(gradient, truth) < 1e-9, key


@pytest.mark.parametrize("name", NAMES)
def test_the_error_does_not_grow_with_the_number_of_ranks(name):
    """In float32, with decays from near 0 to near 1, over all spans of zigzag rings of 1 to 16 ranks."""
    layer, tokens = LAYERS[name], 320

    def results(dtype: torch.dtype, ranks: int) -> list[Tensor]:
        leaves = {
            key: x.to(dtype).requires_grad_() if isinstance(x, Tensor) else x
            for key, x in inputs(name, 1, tokens, size=8).items()
        }
        places = plan_of(rs.Layout("zigzag", tokens, ranks), ((0,),)).places
        sequences = SequencePass((spans_of([place.tokens for place in places]),), None)
        out = recurrence(layer.rule, layer.of(dtype), leaves, sequences)
        weights = torch.randn(
            out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        tensors = [x for x in leaves.values() if isinstance(x, Tensor)]
        return [
            out.detach(),
            *torch.autograd.grad((out * weights.to(dtype)).sum(), tensors),
        ]

    truth = results(torch.float64, 1)
    errors = {
        ranks: [*map(relative, results(torch.float32, ranks), truth)]
        for ranks in (1, 2, 5, 16)
    }
    for ranks, found in errors.items():
        for error, alone in zip(found, errors[1], strict=True):
            assert error < 2 * alone + 1e-7, (ranks, errors)


@settings(max_examples=40)
@given(cut=cut_sequences(), taps=st.integers(1, 6))
def test_a_convolution_reaches_back_within_its_document(cut, taps):
    lengths, starts = cut
    tokens, rows = sum(lengths), len(starts)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(
        rows, 3, tokens, generator=generator, dtype=torch.float64, requires_grad=True
    )
    weight = torch.randn(
        3, taps, generator=generator, dtype=torch.float64, requires_grad=True
    )
    bias = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    function = module_of("lfm2", torch.float64)["causal_conv1d_fn"]
    out = convolution(
        function, x, weight, bias, SequencePass((spans_of(lengths),), None, starts)
    )
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad((out * weights).sum(), (x, weight, bias))
    where = {"x": 2}, 2, starts, rows, tokens
    whole = by_document(
        lambda part: function(part["x"], weight, bias), {"x": x}, *where
    )
    expected = torch.autograd.grad((whole * weights).sum(), (x, weight, bias))
    plain = [each.detach().numpy() for each in (weight, bias)]
    oracle = by_document(
        lambda part: causal_convolution(part["x"].numpy(), *plain),
        {"x": x.detach()},
        *where,
    )
    assert relative(out, oracle) < 1e-12
    for gradient, truth in zip(found, expected, strict=True):
        assert relative(gradient, truth) < 1e-12


def over_spans(name: str, tokens: int, sequences: SequencePass) -> Any:
    """A layer's outputs over spans, its arguments, their token dimensions, and what computes it of consecutive ones."""
    if name == "convolution":
        generator, function = (
            torch.Generator().manual_seed(0),
            module_of("lfm2", torch.float64)["causal_conv1d_fn"],
        )
        shapes = {"hidden_states": (1, 3, tokens), "weight": (3, 4), "bias": (3,)}
        made = {
            key: torch.randn(shape, generator=generator, dtype=torch.float64)
            for key, shape in shapes.items()
        }
        x, weight, bias = (x.requires_grad_() for x in made.values())
        return (
            convolution(function, x, weight, bias, sequences),
            made,
            {"hidden_states": 2},
            lambda p: function(**p),
        )
    layer, made = LAYERS[name], inputs(name, 1, tokens)
    for x in made.values():
        if isinstance(x, Tensor):
            x.requires_grad_()
    function = layer.of(torch.float64)
    out = recurrence(layer.rule, function, made, sequences)
    return (
        out,
        made,
        layer.rule.dims,
        lambda part: layer.rule.run(function, part, None)[0],
    )


@pytest.mark.parametrize("name", [*NAMES, "convolution"])
@settings(max_examples=12)
@given(given_tree=trees(), spans=st.lists(st.integers(1, 12), min_size=40, max_size=40))
def test_a_segment_takes_the_state_that_its_parent_ends_with(name, given_tree, spans):
    tree = Tree(*map(tuple, given_tree))
    tokens = sum(tree.lengths)
    lengths = np.diff(np.minimum(np.cumsum([0, *spans]), tokens))
    sequences = SequencePass(
        (spans_of([length for length in lengths.tolist() if length]),), None, (tree,)
    )
    out, made, dims, compute = over_spans(name, tokens, sequences)
    dim, chains, own = next(iter(dims.values())), list[Tensor](), list[Tensor]()
    for segment, parent in zip(
        torch.arange(tokens).split(tree.lengths), tree.parents, strict=True
    ):
        chains.append(segment if parent < 0 else torch.cat((chains[parent], segment)))
        part = {
            key: x.index_select(dims[key], chains[-1])
            if key in dims and isinstance(x, Tensor)
            else x
            for key, x in made.items()
        }
        own.append(
            compute(part).narrow(dim, len(chains[-1]) - len(segment), len(segment))
        )
    expected, leaves = (
        torch.cat(own, dim),
        [x for x in made.values() if isinstance(x, Tensor)],
    )
    weights = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype
    )
    found, truth = (
        torch.autograd.grad((x * weights).sum(), leaves) for x in (out, expected)
    )
    for one, other in ((out, expected), *zip(found, truth, strict=True)):
        assert relative(one, other) < 1e-9


@pytest.mark.parametrize(
    ("ranks", "layout", "is_matrix"),
    cases.pairwise([1, 2, 3, 5, 12], ["contiguous", "zigzag"], [True, False]),
)
def test_ranks_send_states_and_their_gradients(ranks, layout, is_matrix):
    """Many ranks, of which each holds its own spans, against one that holds them all."""
    split = rs.Layout(layout, 8 * ranks, ranks)
    plan = plan_of(split, ((0,), (0, 5, 13)))
    generator = torch.Generator().manual_seed(0)
    shape = (len(plan.places), 2, 3, 3 if is_matrix else 1)
    maps = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7
    states = torch.randn(*shape[:3], 4, generator=generator, dtype=torch.float64)
    for row, starts in enumerate(plan.starts):
        for number in range(len(plan.places)):
            maps[number, row] *= plan.passes(number, starts)
    spans = [(place.start, place.tokens) for place in plan.places]
    together = plan_of(CustomLayout.of([spans], 8 * ranks), plan.starts)

    def of_rank(rank: int, transport: Any, options: Any) -> Tensor:
        mine = list(plan.mine(rank))
        return scan(maps[mine], states[mine], plan, rank, transport, **options)

    for reverse in (False, True):
        options = {"is_matrix": is_matrix, "reverse": reverse}
        ((expected,), _) = on_ranks(
            1, lambda _, t, o=options: scan(maps, states, together, 0, t, **o)
        )
        found, mailboxes = on_ranks(
            ranks, lambda rank, t, o=options: of_rank(rank, t, o)
        )
        for rank in range(ranks):
            torch.testing.assert_close(
                found[rank], expected[list(plan.mine(rank))], rtol=1e-12, atol=1e-12
            )
        if len(plan.places) <= 8:
            assert sum(box.num_sends for box in mailboxes) <= len(plan.places) - 1


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("ranks", "length"), [(2, 5), (5, 7), (3, 40)])
def test_ranks_send_halos_and_their_gradients(ranks, length, layout):
    plan = plan_of(rs.Layout(layout, length, ranks), ((0, 3),))
    tokens = plan.layout.padded_length
    x = torch.randn(
        2, 3, tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )

    def halo(rank: int, transport: Any) -> Tensor:
        mine = x[..., torch.from_numpy(plan.layout.positions(rank))]
        return lend(mine, mine.shape[-1], 4, plan, rank, transport, reverse=False)

    halos, _ = on_ranks(ranks, halo)
    for rank, found in enumerate(halos):
        for index, number in enumerate(plan.mine(rank)):
            reach = plan.reach_back(number, 4, plan.starts[0])
            start = plan.places[number].start
            expected = torch.zeros(2, 3, 4, dtype=torch.float64)
            expected[..., 4 - reach :] = x[..., start - reach : start]
            torch.testing.assert_close(found[index], expected, rtol=0, atol=0)

    # The transpose: <halo(x), y> = <x, halo_backward(y)>.
    ys = [
        torch.randn(
            each.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64
        )
        for each in halos
    ]
    backs, _ = on_ranks(
        ranks,
        lambda rank, t: lend(
            ys[rank], plan.layout.tokens_of(rank), 4, plan, rank, t, reverse=True
        ),
    )
    left = sum(float((halo_ * y).sum()) for halo_, y in zip(halos, ys, strict=True))
    right = sum(
        float((back * x[..., torch.from_numpy(plan.layout.positions(rank))]).sum())
        for rank, back in enumerate(backs)
    )
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gated delta rule", "initial_state"),
        ("kimi delta attention", "output_final_state"),
        ("mamba-2", "initial_states"),
        ("mamba-2", "return_final_states"),
        ("mamba", "return_last_state"),
    ],
)
def test_a_kernel_that_has_no_argument_for_states_is_refused(name, missing):
    """As transformers calls one: what it has no argument for is left out."""
    layer = LAYERS[name]
    plain = layer.of(torch.float64)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{key: x for key, x in kwargs.items() if key != missing})

    with pytest.raises(
        rs.UnsupportedError,
        match=rf"^kernel neither begins with a given state .*{missing}",
    ) as caught:
        recurrence(
            layer.rule,
            kernel,
            inputs(name, 2, 9),
            SequencePass((spans_of([4, 5]),), None),
        )
    assert "\n" not in str(caught.value)


def sent_by_a_layer(mesh: Any, name: str, tokens: int, split: Any = "zigzag") -> int:
    """Bytes that this rank sends for a layer with a state and a convolution, forward and backward."""
    ring = mesh["ring"]
    layer = LAYERS[name]
    arguments = {
        key: x.float() if isinstance(x, Tensor) else x
        for key, x in inputs(name, 1, tokens).items()
    }
    layout = rs.Layout(split, tokens * ring.size(), ring.size())
    before = COUNTERS.sent_bytes
    for x in arguments.values():
        if isinstance(x, Tensor):
            x.requires_grad_()
    sequences = SequencePass((layout,), ring.get_group())
    recurrence(
        layer.rule, layer.of(torch.float32), arguments, sequences
    ).sum().backward()
    x = torch.randn(1, 3, tokens, requires_grad=True)
    function = module_of("lfm2", torch.float64)["causal_conv1d_fn"]
    convolution(function, x, torch.randn(3, 4), None, sequences).sum().backward()
    return COUNTERS.sent_bytes - before


def test_a_rank_that_only_lends_takes_part_in_backward(pool):
    first, second = pool.run(sent_by_a_layer, 2, "mamba-2", 16, "contiguous")
    assert first == second, "a state and a halo that way, their gradients back"


@pytest.mark.parametrize("name", ["gated delta rule", "mamba-2"])
def test_what_a_layer_sends_does_not_depend_on_the_length(pool, name):
    short = pool.run(sent_by_a_layer, 2, name, 64)
    assert short == pool.run(sent_by_a_layer, 2, name, 1024)
    # heads, key size, value size, bytes: each way one to the next span
    state = 2 * 4 * 5 * 4
    halo = 3 * 3 * 4
    assert sum(short) == 2 * 2 * (state + halo)


def test_kept_states_are_not_recomputed_and_belong_to_their_pass():
    calls: list[Any] = []

    def checkpoint(function: Any, x: Tensor) -> tuple[Any, Any]:
        return function(x), lambda: function(x)

    def layer(x: Tensor) -> Tensor:
        now = current_pass()
        assert now is not None
        assert now.record is not None

        def compute() -> tuple[Tensor, ...]:
            calls.append(now.starts)
            return (x * len(now.starts[0]),)

        return now.record.made(compute)[0]

    again = []
    for starts in ((0,), (0, 3)):
        with passing(SequencePass((spans_of([4]),), None, (starts,))):
            first, later = carried(checkpoint, Switches(torch.nn.Module()), keeps=True)(
                layer, torch.ones(2)
            )
        again.append((first, later))
    for first, later in again:
        torch.testing.assert_close(later(), first)
        torch.testing.assert_close(later(), first)
    assert calls == [((0,),), ((0, 3),)]
