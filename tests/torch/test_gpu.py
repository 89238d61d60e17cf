"""The kernels of CUDA on a GPU, against the float64 oracle: as accurate as one device, on any mask, layout and ring."""

import pytest
import torch

import ringspan as rs
from ringspan.core.schedule.schedule import make_schedule
from ringspan.torch.engine import kernels
from ringspan.torch.engine.kernels.contract import Scores
from ringspan.torch.model.memory.offload import Store
from tests.torch.engine.attention.test_ring import FLOAT32_LIMIT, Problem, relative
from tests.torch.merge import check_merge

pytestmark = pytest.mark.gpu
# bfloat16 rounds to 2**-9 = 2e-3; one device has 3e-3 to 4e-3 on such inputs
BFLOAT16_LIMIT = 6e-3
# gradients of sinks are a number a head: too few for one run's error to say what another's may be
ONE_ROUNDING = 2**-9
OF_CUDA = ("cudnn", "flash", "flash2", "flash3", "flash4", "triton")
MASKS = [
    rs.causal(), rs.full(), rs.sliding_window(70), rs.prefix_lm(40), rs.documents([9, 130, 61, 5, 95, 1, 200]),
]  # fmt: skip


def skip_unless_served(kernel, problem):
    scores = Scores(1.0, softcap=problem.softcap, slopes=problem.slopes)
    if reason := kernels.why_not(kernel, problem.q, problem.v, scores):
        pytest.skip(f"{kernel}: {reason}")


def check(problem, layout, kernel, sizes):
    """The error is that of half precision, and does not grow with the number of ranks."""
    skip_unless_served(kernel, problem)
    one = problem.errors(layout, 1, kernel=kernel)
    assert max(one) < BFLOAT16_LIMIT
    for ranks in sizes:
        for error, limit in zip(
            problem.errors(layout, ranks, kernel=kernel), one, strict=True
        ):
            assert error < max(1.4 * limit, ONE_ROUNDING)


@pytest.mark.parametrize("kernel", OF_CUDA)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_any_mask_in_bfloat16(kernel, mask, layout):
    problem = Problem(
        501, mask, heads=4, groups=2, size=64, dtype=torch.bfloat16, device="cuda"
    )
    check(problem, layout, kernel, (3, 8))


@pytest.mark.parametrize("kernel", OF_CUDA)
@pytest.mark.parametrize(
    ("size", "value_size"), [(128, 128), (40, 40), (96, 64), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_head_sizes(kernel, size, value_size, batch):
    shape = {
        "batch": batch,
        "heads": 2,
        "groups": 1,
        "size": size,
        "value_size": value_size,
    }
    problem = Problem(
        300, rs.documents([130, 70, 100]), dtype=torch.bfloat16, device="cuda", **shape
    )
    check(problem, "zigzag", kernel, (2,))


@pytest.mark.parametrize("kernel", ["flash2", "flash3", "triton"])
@pytest.mark.parametrize("has_slopes", [False, True])
def test_soft_caps_slopes_and_sinks(kernel, has_slopes):
    problem = Problem(
        300,
        rs.causal(),
        heads=4,
        groups=2,
        size=64,
        softcap=5.0,
        has_slopes=has_slopes,
        has_sinks=True,
        dtype=torch.bfloat16,
        device="cuda",
    )
    check(problem, "zigzag", kernel, (3,))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_our_kernel_in_float32(mask):
    problem = Problem(501, mask, heads=4, groups=2, size=32, device="cuda")
    skip_unless_served("triton", problem)
    for ranks in (1, 4):
        assert max(problem.errors("zigzag", ranks, kernel="triton")) < FLOAT32_LIMIT


def test_our_kernel_gives_the_same_bits_every_time():
    problem = Problem(
        700,
        rs.causal(),
        heads=8,
        groups=2,
        size=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    skip_unless_served("triton", problem)
    first, second = (problem.on_ring("zigzag", 2, kernel="triton")[0] for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [128, 5])
def test_the_fused_merge_is_the_rule(dtype, size):
    pytest.importorskip("triton")
    check_merge(dtype, size, "cuda")


def test_auto_takes_a_fast_kernel():
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
    names = kernels.serving("auto", q, q, Scores(1.0))
    hop = make_schedule(rs.Layout("zigzag", 8, 1), rs.causal(), 0).hops[0]
    assert kernels.choose(names, hop.bands, q).name != "eager"


def layer(q, k, v):
    return rs.ring_attention(q * 2, k, v) + 1


@pytest.fixture
def inputs():
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(
            1, heads, 1024, 64, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for heads in (8, 2, 2)
    ]


def test_it_compiles(inputs):
    expected = layer(*inputs)
    out = torch.compile(layer, fullgraph=True)(*inputs)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    dout = torch.ones_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, dout),
        torch.autograd.grad(expected, inputs, dout),
        strict=True,
    ):
        assert (
            relative(*(x.double().cpu().numpy() for x in (ours, theirs, theirs)))
            < 2**-7
        )


def test_a_cuda_graph_replays_it(inputs):
    with torch.no_grad():
        expected = layer(*inputs)  # and tunes and caches what it needs
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(*inputs)
        out.zero_()
        graph.replay()
    assert torch.equal(out, expected)


def test_the_steady_state_asks_the_device_for_no_memory(inputs):
    def step():
        out = layer(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(5):
        step()
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_what_is_offloaded_comes_back_from_pinned_memory():
    """Although others have written where it was."""
    tensors, size = 8, 1 << 20
    store, parked = Store(min_bytes=1), []
    before = torch.cuda.memory_allocated()
    for number in range(tensors):
        parked.append(store.put(torch.full((size,), float(number), device="cuda")))
        torch.full((size,), -1.0, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so that what waited for a copy is given back
    assert torch.cuda.memory_allocated() <= before
    for number in reversed(range(tensors)):
        for again in (True, False):
            back = store.get(parked[number], again=again)
            assert bool((back == number).all())
            back.fill_(-1.0)
