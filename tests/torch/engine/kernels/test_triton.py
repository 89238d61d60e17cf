"""Our Triton kernels in Triton's interpreter on the CPU, against the rules in float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.names import LAYOUT_NAMES
from ringspan.torch.engine import kernels
from ringspan.torch.engine.kernels.contract import Scores
from tests.core.strategies import masks
from tests.fuzz import examples
from tests.torch.engine.attention.test_ring import FLOAT32_LIMIT, Problem, shapes, views
from tests.torch.merge import check_merge

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/torch/test_gpu.py runs them on the GPU"
)


MERGES = [
    (torch.float32, 5, 2, False),
    (torch.bfloat16, 16, 8, True),
    (torch.bfloat16, 5, 10, False),
]


@pytest.mark.parametrize(("dtype", "size", "count", "has_sinks"), MERGES)
def test_the_fused_merge_is_the_rule(dtype, size, count, has_sinks):
    check_merge(dtype, size, "cpu", count, has_sinks=has_sinks)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    from ringspan.torch.engine.kernels.local import triton_attention
    from tests.torch.interpreter import interpreted

    for name in ("forward_into", "backward_into"):
        monkeypatch.setattr(
            triton_attention, name, interpreted(getattr(triton_attention, name))
        )


@given(
    length=st.integers(1, 60),
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.sampled_from([1, 2, 3]),
    shape=shapes([(1, 1), (4, 2)], [(8, 8), (16, 16), (5, 7)]),
    softcap=st.sampled_from([0.0, 2.0]),
    has_slopes=st.booleans(),
    has_sinks=st.booleans(),
    views=views,
)
@examples(
    8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_any_mask_through_our_kernel(length, mask, layout, ranks, shape, **options):
    problem = Problem(length, mask, **shape, **options)
    assert max(problem.errors(layout, ranks, kernel="triton")) < FLOAT32_LIMIT


@pytest.mark.parametrize(
    "view", ["tokens last", "fused, numbers interleaved", "expanded numbers"]
)
def test_our_kernel_reads_views_and_its_sums_lie_in_rows(view):
    problem = Problem(
        24, rs.causal(), heads=2, groups=1, size=8, has_sinks=True, views=[view] * 4
    )
    assert max(problem.errors("contiguous", 1, kernel="triton")) < FLOAT32_LIMIT


@pytest.mark.parametrize(
    "mask",
    [rs.causal(), rs.sliding_window(70), rs.documents([9, 80, 11, 5, 55])],
    ids=str,
)
def test_several_blocks_and_grains(mask):
    """Blocks inside, on and outside of the borders of a band, on rows and keys of more than one list of tiles."""
    problem = Problem(160, mask, heads=1, groups=1, size=16)
    assert max(problem.errors("zigzag", 1, kernel="triton")) < FLOAT32_LIMIT


def test_half_precision_rounds_inputs_and_probabilities_only():
    """float16, since the interpreter multiplies bfloat16 numbers as if they were integers."""
    problem = Problem(96, rs.causal(), heads=2, groups=1, size=16, dtype=torch.float16)
    one, several = (
        problem.errors("zigzag", ranks, kernel="triton") for ranks in (1, 3)
    )
    assert max(one) < 2**-11
    assert all(error < 1.1 * alone for error, alone in zip(several, one, strict=True))


def test_it_is_one_launch_a_hop(monkeypatch):
    from ringspan.torch.engine.kernels.local import triton_attention

    made, forward = [], triton_attention.forward_into
    monkeypatch.setattr(
        triton_attention, "forward_into", lambda *a: made.append(a[3]) or forward(*a)
    )
    Problem(48, rs.documents([3, 9, 4, 7, 1, 12, 5, 7]), heads=1, groups=1).on_ring(
        "striped", 2, kernel="triton"
    )
    assert len(made) == 2 * 2 and max(len(launch.tiles) for launch in made) >= 7


def test_the_operator_runs_triton_by_name_and_auto_does_not():
    q, k, v = (torch.randn(1, heads, 24, 16, requires_grad=True) for heads in (4, 2, 2))
    ours, theirs = (
        rs.ring_attention(q, k, v, kernel=kernel) for kernel in ("triton", "eager")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert "triton" not in kernels.serving("auto", q, v, Scores(1.0, softcap=2.0))


def test_it_refuses_what_it_cannot_do(monkeypatch):
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(rs.UnsupportedError, match="float32, these are float64"):
        rs.ring_attention(*(x.double() for x in (q, q, q)), kernel="triton")
    wide = torch.zeros(1, 2, 8, 320)
    with pytest.raises(
        rs.UnsupportedError, match="at most 128 numbers, these have 320"
    ):
        rs.ring_attention(wide, wide, wide, kernel="triton")
    wide = wide.bfloat16()
    with pytest.raises(
        rs.UnsupportedError, match="at most 256 numbers, these have 320"
    ):
        rs.ring_attention(wide, wide, wide, kernel="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        rs.UnsupportedError, match="needs CUDA tensors, these are on cpu"
    ):
        rs.ring_attention(q, q, q, kernel="triton")


def without_interpreter(script: str) -> str:
    """What a program prints for which Triton compiles."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    command, folder = [sys.executable, "-c", script], Path(__file__).parents[4]
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert not run.returncode, run.stderr
    return run.stdout


def test_new_lengths_compile_no_program_anew():
    """Launches at random rows and keys give Triton's own binder few keys to remember programs by."""
    script = """
import random, torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunch
from ringspan.gpu import attention
from ringspan.torch.engine.kernels.contract import BackwardInputs
from ringspan.torch.engine.kernels.local import triton_attention as ours
from ringspan.torch.engine.kernels.partials import triton_merge
from ringspan.torch.engine.kernels.contract import Scores

class Recorder:
    def __init__(self, program, **blocks):
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(program.signature, program.params, backend)
        self.keys, self.blocks = set(), blocks
    def __getitem__(self, grid):
        return lambda *given, **options: self.keys.add(str(self.bind(*given, **options, **self.blocks)[1:]))

torch.use_deterministic_algorithms(True)
tried = ours._forward.early_config_prune([], {"q": torch.zeros(1)}, SIZE=64, VALUE_SIZE=64)
torch.use_deterministic_algorithms(False)
tuned = {}
for name in ("forward", "backward_queries", "backward_keys"):
    tuned[name] = Recorder(getattr(attention, name), ROWS=64, KEYS=64)
    setattr(ours, "_" + name, tuned[name])
merge = triton_merge._merge = Recorder(triton_merge._merge)
tokens = 4000
q, k, out = (torch.zeros(1, tokens, heads, 64).transpose(1, 2) for heads in (4, 2, 4))
q, k = q.bfloat16(), k.bfloat16()
lse, scores, draw = torch.zeros(1, 4, tokens), Scores(0.125), random.Random(0)
for _ in range(40):
    rows, keys = (sorted(draw.sample(range(1, tokens), 2)) for _ in range(2))
    a, b = slice(*rows), slice(*keys)
    launch = KernelLaunch.of(Tile.full(*rows, *keys))
    mine, theirs = (q[:, :, a],), (k[:, :, b], k[:, :, b])
    ours.forward_into(*mine, *theirs, launch, scores, out[:, :, a], lse[:, :, a])
    given = BackwardInputs(q[:, :, a], *mine, *theirs, q[:, :, a], lse[:, :, a])
    ours.backward_into(given, launch, scores, out[:, :, a], *(out[:, :2, b] for _ in range(2)))
    new = torch.zeros(1, rows[1] - rows[0], 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    other = new, torch.zeros(1, 4, rows[1] - rows[0])
    triton_merge.merge_many(q[:, :, a], lse[:, :, a], [(out[:, :, a], lse[:, :, a]), other, other])
print({name: len(one.keys) for name, one in (tuned | {"merge": merge}).items()} | {"deterministic": len(tried)})
"""
    found = json.loads(without_interpreter(script).replace("'", '"'))
    # The bucket for which small problems are tuned by themselves.
    assert found == {
        "forward": 2,
        "backward_queries": 2,
        "backward_keys": 2,
        "merge": 1,
        "deterministic": 1,
    }


@pytest.mark.long
def test_they_compile_for_gpus_that_are_not_there():
    """By Triton's and NVIDIA's own compilers, which need no device; the interpreter takes what these do not."""
    script = (
        "import json, torch\n"
        "from benchmarks.triton_kernels import compile_all\n"
        "print(json.dumps(compile_all(90, torch.bfloat16, 64, 64, True, slice(-1, None))))\n"
    )
    rows = {row["kernel"]: row for row in json.loads(without_interpreter(script))}
    assert rows.keys() == {"forward", "backward_queries", "backward_keys", "merge"}
    assert all(
        row["fits"] and 0 < row["registers"] < 255 and row["spilled_bytes"] == [0, 0]
        for row in rows.values()
    )
