"""JAX's ring with our Triton programs on a GPU, against the float64 oracle."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import sys
import jax, jax.numpy as jnp, torch
import ringspan as rs
from tests.jax.rings import attention_and_gradients
from tests.jax.test_attention import arrays, errors
from tests.torch.engine.attention.test_ring import Problem

jax.config.update("jax_default_matmul_precision", "highest")
for mask in (rs.causal(), rs.sliding_window(100), rs.documents([200, 7, 493, 300])):
    for dtype in (torch.float32, torch.bfloat16):
        problem = Problem(1000, mask, heads=4, groups=2, size=64, dtype=dtype)
        inputs = [jnp.asarray(x, str(dtype).removeprefix("torch.")) for x in arrays(problem)]
        split = rs.Layout("zigzag", 1000, 1)
        ours, others = (
            errors(problem, attention_and_gradients(*inputs, split, mask, kernel=kernel)) for kernel in sys.argv[1:]
        )
        assert all(one < 1e-5 or one < 1.2 * other for one, other in zip(ours, others)), (mask, dtype, ours, others)
"""


@pytest.mark.gpu
@pytest.mark.skipif(
    not (find_spec("jax") and find_spec("jax_triton")), reason="needs jax-triton"
)
def test_it_is_as_exact_as_the_other_kernel():
    """In a process of its own: those of the tests see virtual CPU devices only."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cuda",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-c", SCRIPT, "triton", "xla"]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert not run.returncode, run.stderr
