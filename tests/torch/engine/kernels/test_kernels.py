"""Local kernels: which computes what, what each refuses, and those of CUDA through stand-ins for their operators."""

import platform
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.tile import Tile
from ringspan.core.names import LAYOUT_NAMES
from ringspan.core.schedule.kernel_launches import (
    KernelLaunch,
    Window,
    bands,
    chains,
    pieces,
    squares,
    whole,
    windows,
)
from ringspan.core.schedule.schedule import make_schedule
from ringspan.torch.engine import kernels
from ringspan.torch.engine.attention.calls import calls_of
from ringspan.torch.engine.kernels.contract import ANY, BackwardInputs, Scores
from ringspan.torch.engine.kernels.device import (
    ChunkSize,
    DeviceRules,
    multiplies_16_bits,
    ruled_by,
    rules_of,
)
from tests.core.strategies import layouts, masks
from tests.fuzz import examples
from tests.torch.engine.attention.test_ring import FLOAT32_LIMIT, Problem, shapes, views
from tests.torch.standins import OF_CUDA, calls, installed
from tests.torch.views import VIEWS

PLAIN = Scores(1.0)
CPU = torch.device("cpu")
widths = st.integers(1, 12) | st.sampled_from([16, 32])  # of chunks


@pytest.fixture
def standins():
    with installed():
        yield


def pairs(tiles):
    """Every (row, key) of some tiles, as often as it is there."""
    return sorted(
        (tile.q0 + i, tile.k0 + j)
        for tile in tiles
        for i in range(tile.num_rows)
        for j in range(tile.num_keys)
        if tile.lo <= i - j <= tile.hi
    )


@given(layouts, masks)
@examples(100)
def test_however_tiles_are_grouped_each_pair_is_computed_once(layout, mask):
    hops = [
        hop
        for rank in range(layout.ranks)
        for hop in make_schedule(layout, mask, rank).hops
    ]
    for tiles in (hop.bands for hop in hops):
        expected = pairs(tiles)
        for group in (bands, pieces, squares, chains, windows, whole):
            found = [(launch, tile) for launch in group(tiles) for tile in launch.tiles]
            assert (
                pairs(tile.shifted(launch.q0, launch.k0) for launch, tile in found)
                == expected
            )
            for launch, tile in found:
                assert (
                    0 <= tile.q0 < tile.q1 <= launch.num_rows
                    and 0 <= tile.k0 < tile.k1 <= launch.num_keys
                )
        for launch in squares(tiles):
            tile = launch.tile
            assert tile.is_full or (
                tile.num_rows == tile.num_keys
                and (tile.is_causal or tile.is_anticausal)
            )


@given(layouts, masks)
@examples(100)
def test_a_band_is_a_window_from_the_last_corner(layout, mask):
    for tile in (
        tile
        for rank in range(layout.ranks)
        for hop in make_schedule(layout, mask, rank).hops
        for tile in hop.bands
    ):
        window, shift = Window.of(tile), tile.num_keys - tile.num_rows
        assert min(window) >= -1
        inside = [
            (tile.q0 + i, tile.k0 + j)
            for i in range(tile.num_rows)
            for j in range(tile.num_keys)
            if (window.right < 0 or j - i - shift <= window.right)
            and (window.left < 0 or j - i - shift >= -window.left)
        ]
        assert inside == pairs([tile])


@pytest.mark.parametrize("kernel", OF_CUDA)
@given(
    length=st.integers(1, 50),
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.integers(1, 4),
    shape=shapes([(1, 1), (4, 2)], [(8, 8), (12, 8), (5, 7)]),
    softcap=st.sampled_from([0.0, 2.0]),
    has_sinks=st.booleans(),
    views=views,
    route=st.sampled_from(["ring", "all-gather"]),
)
@examples(
    12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_mask_through_the_kernels_of_cuda(
    standins, kernel, length, mask, layout, ranks, shape, softcap, route, **options
):
    softcap = softcap if kernel in ("flash2", "flash3") else 0.0
    problem = Problem(length, mask, softcap=softcap, **shape, **options)
    with ruled_by(cpu=replace(rules_of(CPU), cuts_for_cores=False)):
        assert max(problem.errors(layout, ranks, route, kernel=kernel)) < FLOAT32_LIMIT


@pytest.mark.parametrize(("view", "kernel"), zip(VIEWS, cycle(OF_CUDA)))
def test_the_kernels_of_cuda_are_given_rows_that_they_can_load(standins, kernel, view):
    problem = Problem(
        24, rs.sliding_window(9), batch=2, heads=4, groups=2, size=8, views=[view] * 4
    )
    assert max(problem.errors("contiguous", 2, kernel=kernel)) < FLOAT32_LIMIT


def test_every_kernel_says_how_tensors_must_lie_and_gets_them_so():
    x = torch.randn(2, 2, 8, 16, dtype=torch.bfloat16)
    for kernel in kernels.KERNELS.values():
        for name, view in VIEWS.items():
            seen = view(x)
            (laid,) = kernels.laid_out((kernel.name,), seen)
            assert kernel.memory.fits(laid) and torch.equal(laid, seen), (
                kernel.name,
                name,
            )
            assert kernel.memory.fits(seen) == (laid is seen), (
                "what lies right is not copied"
            )
    fitting = {
        name
        for name, view in VIEWS.items()
        if kernels.KERNELS["cpu"].memory.fits(view(x))
    }
    assert fitting == {
        "contiguous",
        "tokens before heads",
        "fused projection",
        "every other token",
        "every other head",
        "offset",
        "expanded sequences",
        "expanded heads",
    }
    aligned = {
        name
        for name, view in VIEWS.items()
        if kernels.KERNELS["flash"].memory.fits(view(x))
    }
    assert fitting - aligned == {"offset", "expanded sequences", "expanded heads"}
    assert kernels.KERNELS["eager"].memory == ANY


@given(
    length=st.integers(1, 50),
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.integers(1, 3),
    shape=shapes([(3, 3), (4, 2), (3, 1)], [(8, 8), (5, 7)]),
    softcap=st.sampled_from([0.0, 2.0]),
    has_slopes=st.booleans(),
    chunk_size=st.builds(ChunkSize, widths, widths, st.sampled_from([1, 100, 1 << 18])),
    others=st.none() | st.integers(1, 20),
)
@examples(30)
def test_any_mask_through_plain_pytorch_whatever_its_chunks(
    length, mask, layout, ranks, shape, chunk_size, others, **scores
):
    """Alone, or beside another kernel in hops where rows see ``others`` keys or more."""
    problem = Problem(length, mask, **shape, **scores)
    rules = replace(
        rules_of(CPU), chunk_size=chunk_size, short_rows=others and (0, others - 1e-6)
    )
    with ruled_by(cpu=rules):
        assert (
            max(problem.errors(layout, ranks, kernel="auto" if others else "eager"))
            < FLOAT32_LIMIT
        )


def test_a_scale_of_zero_gives_every_key_the_same_weight():
    q, k, v = (torch.randn(1, 2, 10, 4, requires_grad=True) for _ in range(3))
    for softcap in (None, 2.0):
        out = rs.ring_attention(q, k, v, mask=rs.full(), scale=0.0, softcap=softcap)
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert not dq.any() and not dk.any()
        torch.testing.assert_close(dv, torch.ones_like(v))


def test_eager_keeps_scores_further_apart_than_a_float_holds():
    """The probabilities of some are denormal, of others 0; and what is forbidden is far above what is allowed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, 300, 4, generator=generator).double() for _ in range(3)
    )
    q, k = q * 30, k * 30
    k[:, :, -1] = 500 * q[:, :, 0]
    ours, exact = (
        rs.ring_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), mask=rs.causal(), kernel="eager"
        )
        for dtype in (torch.float32, torch.float64)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)
    # scores of 5,000 round to 2e-4
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kernel", ["flash", "flash2", "flash3", "flash4"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_packed_documents_are_a_call_a_hop_or_two(standins, kernel, layout):
    documents = rs.documents([3, 9, 4, 7, 1, 12, 5, 8, 2, 6, 7])
    calls()
    out = Problem(64, documents, batch=2).on_ring(layout, 2, kernel=kernel)[0][0]
    forward = [
        name for name in calls() if name.startswith(kernel) and "backward" not in name
    ]
    groups, ranks, hops = 2, 2, 2
    assert out.shape[2] == 64
    # A document that crosses the border of a chunk is a rectangle, beside the squares of the others.
    assert 0 < len(forward) <= 2 * groups * ranks * hops


@pytest.mark.parametrize(
    ("capability", "forward"),
    [((9, 0), "triton"), ((8, 0), "flash"), ((10, 0), "flash")],
)
def test_on_hopper_windows_go_to_our_own_kernel_forward(capability, forward):
    names, band, q = (
        ("cudnn", "flash", "triton", "eager"),
        Tile(0, 8, 0, 8, 0, 3),
        torch.zeros(1, 2, 8, 16),
    )
    with ruled_by(cpu=DeviceRules(cuts_for_cores=False, capability=capability)):
        assert kernels.choose(names, (band,), q).name == forward
        assert kernels.choose(names, (band,), q, is_backward=True).name == "flash"
        assert kernels.choose(("flash3", *names), (band,), q).name == "flash3"


@pytest.mark.parametrize("kernel", ["flash", "flash2", "flash3", "flash4"])
def test_a_row_between_documents_saw_nothing(standins, kernel):
    launch = KernelLaunch.of(Tile.full(0, 4, 0, 4), Tile.full(6, 9, 6, 9))
    q, k = torch.randn(1, 2, 9, 16), torch.randn(1, 1, 9, 16)
    out, lse = kernels.KERNELS[kernel].forward(q, k, k, launch, Scores(0.25))
    seen = torch.arange(9).sub(4.5).abs() > 1
    assert lse[:, :, seen].isfinite().all() and lse[:, :, ~seen].isneginf().all()
    assert out[:, :, seen].abs().amin() > 0 and out[:, :, ~seen].eq(0).all()


def test_auto_takes_the_first_kernel_that_knows_the_tiles():
    square, rectangle = Tile(0, 8, 0, 8, 0, 7), Tile.full(0, 8, 0, 4)
    band = Tile(0, 8, 0, 8, 0, 3)
    everything = tuple(name for name in kernels.KERNELS if name != "flash4")
    q = torch.zeros(1, 2, 8, 16)
    for tiles in ((square, rectangle), (band,)):
        assert kernels.choose(tuple(kernels.KERNELS), tiles, q).name == "flash4"
    assert kernels.choose(everything, (square, rectangle), q).name == "cudnn"
    assert kernels.choose(everything, (band,), q).name == "flash3"
    assert (
        kernels.choose(
            everything, tuple(square.shifted(8 * i, 8 * i) for i in range(9)), q
        ).name
        == "flash3"
    )
    assert kernels.choose(("cudnn", "flash", "eager"), (band,), q).name == "flash"
    assert kernels.choose(("cudnn", "eager"), (band,), q).name == "cudnn"
    assert kernels.serving("auto", q, q, PLAIN) == ("cpu", "eager")
    assert kernels.serving("auto", q, q, Scores(1.0, softcap=2.0)) == ("eager",)
    assert kernels.serving("flash", q, q, PLAIN) == ("flash",)
    for is_fast, names in ((True, ("cpu", "eager")), (False, ("eager",))):
        with ruled_by(cpu=replace(rules_of(CPU), multiplies_16_bits=is_fast)):
            assert kernels.serving("auto", q.bfloat16(), q, PLAIN) == names


def test_documents_of_new_lengths_leave_cudnn_with_few_plans(monkeypatch):
    """Each size is a plan of its own, which takes longer to make than a hop to compute."""
    monkeypatch.setattr(kernels, "_planned", set())
    numbers, q, sizes = np.random.default_rng(0), torch.zeros(1, 2, 8, 16), set()
    for _ in range(50):
        cuts = np.sort(numbers.choice(np.arange(1, 32_768), 15, replace=False))
        mask = rs.documents(np.diff([0, *cuts, 32_768]).tolist())
        for hop in make_schedule(Layout("zigzag", 32_768, 8), mask, 3).hops:
            if (
                kernels.choose(("cudnn", "flash", "eager"), hop.bands, q).name
                == "cudnn"
            ):
                sizes |= {(tile.num_rows, tile.num_keys) for tile in hop.bands}
    assert 0 < len(sizes) <= 64


def test_cudnn_is_not_chosen_if_gradients_must_be_deterministic():
    schedule, q = (
        make_schedule(Layout("contiguous", 8, 1), rs.causal(), 0),
        torch.zeros(1, 2, 8, 16),
    )

    def chosen():
        passes = (
            calls_of(schedule, ("cudnn", "flash", "eager"), q, is_backward=each)
            for each in (False, True)
        )
        return [kernel.name for (((kernel, _),), _) in passes]

    assert chosen() == ["cudnn", "cudnn"]
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen() == ["cudnn", "flash"], (
            "though the calls of this schedule are known"
        )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("rows", "heads", "dtype", "name"),
    [
        (191, 8, torch.float32, "eager"),
        (190, 8, torch.float32, "cpu"),
        (1023, 1, torch.float32, "eager"),
        (1024, 8, torch.float32, "cpu"),
        (512, 8, torch.bfloat16, "cpu"),
        (512, 8, torch.float64, "cpu"),
    ],
)
def test_on_a_cpu_rows_that_see_few_keys_go_to_plain_pytorch(rows, heads, dtype, name):
    """A causal row of n sees (n + 1) / 2 keys on average."""
    q, tiles = (
        torch.empty(1, heads, 1, 16, dtype=dtype),
        (Tile(0, rows, 0, rows, 0, rows - 1),),
    )
    assert kernels.choose(("cpu", "eager"), tiles, q).name == name
    assert kernels.choose(("cpu",), tiles, q).name == "cpu"
    rectangle = (Tile.full(0, rows, 0, 128),)
    assert kernels.choose(("cpu", "eager"), rectangle, q).name == "cpu"


@pytest.mark.parametrize(
    ("machine", "instructions", "is_fast"),
    [
        ("x86_64", None, False),
        ("AMD64", None, False),
        ("x86_64", "_is_amx_tile_supported", True),
        ("x86_64", "_is_avx512_bf16_supported", True),
        ("aarch64", None, True),
    ],
)
def test_which_cpus_leave_16_bits_to_pytorch(
    monkeypatch, machine, instructions, is_fast
):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name == instructions)
    assert multiplies_16_bits() is is_fast


def test_refusals_name_the_reason():
    def why_not(
        name,
        *,
        dtype=torch.bfloat16,
        size=64,
        value_size=None,
        scores=PLAIN,
        capability=(9, 0),
    ):
        q, v = (FakeCuda(dtype, (1, 2, 8, d)) for d in (size, value_size or size))
        rules = DeviceRules(cuts_for_cores=False, capability=capability, has_cudnn=True)
        with ruled_by(cuda=rules):
            return kernels.why_not(name, q, v, scores)

    assert why_not("cudnn") is None and why_not("flash") is None
    assert "bfloat16 or float16, these are float32" in why_not(
        "cudnn", dtype=torch.float32
    )
    assert "at most 128 numbers, these have 192" in why_not("cudnn", size=192)
    assert "at most 256 numbers, these have 512" in why_not("flash", value_size=512)
    assert "compute capability 8.0, this device has 7.5" in why_not(
        "flash", capability=(7, 5)
    )
    assert "no softcap" in why_not("flash", scores=Scores(1.0, softcap=30.0))
    assert "ALiBi" in why_not("flash", scores=Scores(1.0, slopes=torch.ones(2)))
    for name in ("flash2", "flash3", "flash4"):
        assert "not installed" in why_not(name)
    assert "CPU" in why_not("cpu")
    with installed():
        assert [
            why_not(name, scores=Scores(1.0, softcap=30.0))
            for name in ("flash2", "flash3")
        ] == [None, None]
        assert "no softcap" in why_not("flash4", scores=Scores(1.0, softcap=30.0))


class FakeCuda:
    """What a kernel looks at in a CUDA tensor before it says whether it serves."""

    def __init__(self, dtype, shape):
        self.dtype, self.shape, self.device = dtype, shape, torch.device("cuda", 0)


def ask_for(mesh):
    q = torch.zeros(1, 2, 8, 16)
    rs.ring_attention(
        q,
        q,
        q,
        group=mesh["ring"],
        kernel=("auto", "flash2")[mesh["ring"].get_local_rank()],
    )


def test_a_rank_without_a_package_is_named_on_all(pool):
    for outcome in pool.outcomes(ask_for, 2):
        assert isinstance(
            outcome, rs.PeerMismatch
        ) and "rank 1: flash2 (it needs CUDA" in str(outcome)


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize(
    "tiles",
    [(Tile.full(0, 64, 0, 64),), (Tile(0, 64, 0, 64, 0, 63),)],
    ids=["full", "causal"],
)
def test_the_operators_of_this_pytorch_take_what_they_are_given(kernel, tiles):
    """By their own shape functions, which PyTorch ships without CUDA too."""
    one = kernels.KERNELS[kernel]
    (launch,) = one.launches(tiles)
    q, k, v = (
        torch.empty(1, heads, 64, 64, dtype=torch.bfloat16, device="meta")
        for heads in (4, 2, 2)
    )
    out, lse = one.forward(q, k, v, launch, PLAIN)
    assert (out.shape, out.dtype) == (q.shape, q.dtype) and (lse.shape, lse.dtype) == (
        q.shape[:3],
        torch.float32,
    )
    gradients = one.backward(BackwardInputs(out, q, k, v, out, lse), launch, PLAIN)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
