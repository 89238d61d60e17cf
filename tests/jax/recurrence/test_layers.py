"""Layers with a state in JAX against the float64 oracles, and their gradients against those of the whole sequence."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs ringspan[jax]")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import ringspan as rs
from ringspan.jax import recurrence, shard, unshard
from tests.cases import long
from tests.core.recurrence import reference
from tests.jax.rings import mesh
from tests.jax.test_attention import CUSTOM

BATCH, HEADS, KEY, VALUE = 2, 2, 3, 4
# Of each layer: its arguments by name, with the dimension of tokens of those that have one, and that of its outputs.
LAYERS = {
    "gated delta rule": (
        "delta_rule",
        {"q": 1, "k": 1, "v": 1, "log_decay": 1, "beta": 1},
        1,
    ),
    "kimi delta attention": (
        "delta_rule",
        {"q": 1, "k": 1, "v": 1, "log_decay": 1, "beta": 1},
        1,
    ),
    "mamba-2": (
        "state_space_dual",
        {"x": 1, "dt": 1, "a": None, "b": 1, "c": 1, "d": None},
        1,
    ),
    "mamba": (
        "selective_scan",
        {"x": 2, "dt": 2, "a": None, "b": 2, "c": 2, "d": None},
        2,
    ),
    "lightning attention": (
        "lightning_attention",
        {"q": 2, "k": 2, "v": 2, "slopes": None},
        2,
    ),
    "convolution": ("causal_convolution", {"x": 2, "weight": None, "bias": None}, 2),
}


def arguments(name: str, tokens: int) -> dict[str, np.ndarray]:
    """Random ones, with decays from near 0 to near 1."""
    generator = np.random.default_rng(0)
    normal = generator.standard_normal
    if name in ("gated delta rule", "kimi delta attention"):
        keys = normal((BATCH, tokens, HEADS, KEY))
        channels = (KEY,) if name.startswith("kimi") else ()
        return {
            "q": normal(keys.shape),
            "k": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
            "v": normal((BATCH, tokens, HEADS, VALUE)),
            "log_decay": -np.exp(2 * normal((BATCH, tokens, HEADS, *channels)) - 1),
            "beta": 1 / (1 + np.exp(-normal((BATCH, tokens, HEADS)))),
        }
    if name == "mamba-2":
        return {
            "x": normal((BATCH, tokens, HEADS, VALUE)),
            "dt": np.exp(normal((BATCH, tokens, HEADS)) - 1),
            "a": -np.exp(normal(HEADS)),
            "b": normal((BATCH, tokens, HEADS, KEY)),
            "c": normal((BATCH, tokens, HEADS, KEY)),
            "d": normal(HEADS),
        }
    if name == "mamba":
        return {
            "x": normal((BATCH, VALUE, tokens)),
            "dt": np.exp(normal((BATCH, VALUE, tokens)) - 1),
            "a": -np.exp(normal((VALUE, KEY))),
            "b": normal((BATCH, KEY, tokens)),
            "c": normal((BATCH, KEY, tokens)),
            "d": normal(VALUE),
        }
    if name == "lightning attention":
        keys = BATCH, HEADS, tokens, KEY
        return {
            "q": normal(keys),
            "k": normal(keys),
            "v": normal((BATCH, HEADS, tokens, VALUE)),
            "slopes": np.array([0.02, 1.5]),
        }
    return {
        "x": normal((BATCH, VALUE, tokens)),
        "weight": normal((VALUE, 5)),
        "bias": normal(VALUE),
    }


def on_ring(
    name: str,
    layout: rs.Layout,
    starts: tuple[int, ...],
    given: dict[str, Any],
    dout: Any,
    padding: float,
):
    """Outputs and gradients, in order, of arrays that hold ``padding`` behind the end of the sequence."""
    layer, dims, out_dim = LAYERS[name]
    names = list(given)
    specs = [
        P() if dims[key] is None else P(*[None] * dims[key], "sp") for key in names
    ]

    def local(*arrays: Any) -> Any:
        function = getattr(recurrence, layer)
        return function(
            **dict(zip(names, arrays, strict=True)), layout=layout, starts=starts
        )

    out_spec = P(*[None] * out_dim, "sp")
    whole = jax.jit(
        jax.shard_map(
            local, mesh=mesh(sp=layout.ranks), in_specs=tuple(specs), out_specs=out_spec
        )
    )
    inputs = [
        jnp.asarray(given[key])
        if dims[key] is None
        else shard(given[key], layout, dims[key], value=padding)
        for key in names
    ]
    out, differentiate = jax.vjp(whole, *inputs)
    gradients = differentiate(shard(dout, layout, out_dim))
    ordered = [
        gradient if dims[key] is None else unshard(gradient, layout, dims[key])
        for key, gradient in zip(names, gradients, strict=True)
    ]
    return [np.asarray(x) for x in (unshard(out, layout, out_dim), *ordered)]


def by_document(
    name: str, starts: tuple[int, ...], given: dict[str, np.ndarray]
) -> np.ndarray:
    layer, dims, out_dim = LAYERS[name]
    tokens = next(given[key].shape[dim] for key, dim in dims.items() if dim is not None)
    outs = []
    for first, end in pairwise((*starts, tokens)):
        part = {
            key: x if dims[key] is None else np.take(x, range(first, end), dims[key])
            for key, x in given.items()
        }
        out = getattr(reference, layer)(**part)
        outs.append(out if layer == "causal_convolution" else out[0])
    return np.concatenate(outs, out_dim)


# The delta rule, and the scan of Mamba-2, with other decays.
SLOW = ("kimi delta attention", "mamba")
NUMBERED = [
    pytest.param(number, name, marks=pytest.mark.long if name in SLOW else ())
    for number, name in enumerate(LAYERS)
]


@pytest.mark.parametrize(("number", "name"), NUMBERED)
def test_outputs_are_the_oracles_and_gradients_its_derivatives(number, name):
    """Along a random direction, against differences of the oracle."""
    given, starts = arguments(name, 17), (0, 2, 3, 11)
    generator = np.random.default_rng(2)
    direction = {key: generator.standard_normal(x.shape) for key, x in given.items()}
    step = 1e-6
    ends = [
        by_document(
            name, starts, {key: x + d * direction[key] for key, x in given.items()}
        )
        for d in (step, -step)
    ]
    dout = generator.standard_normal(ends[0].shape)
    with jax.enable_x64(True):
        split = rs.Layout(("contiguous", "zigzag")[number % 2], 17, 3)
        out, *gradients = on_ring(name, split, starts, given, dout, np.nan)
    truth = by_document(name, starts, given)
    np.testing.assert_allclose(out, truth, rtol=0, atol=1e-12 * np.abs(truth).max())
    slope = sum(
        (gradient * direction[key]).sum()
        for key, gradient in zip(given, gradients, strict=True)
    )
    expected = ((ends[0] - ends[1]) / (2 * step) * dout).sum()
    assert slope == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_float32_is_float32_and_bfloat16_keeps_its_states_wider():
    given, split = arguments("mamba-2", 40), rs.Layout("contiguous", 40, 4)
    expected = by_document("mamba-2", (0,), given)
    for dtype, limit in ((jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)):
        narrow = {key: jnp.asarray(x, dtype) for key, x in given.items()}
        out, *_ = on_ring(
            "mamba-2", split, (0,), narrow, jnp.ones(expected.shape, dtype), 0
        )
        assert out.dtype == dtype
        error = np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(
            expected
        )
        assert error < limit, dtype


@pytest.mark.parametrize(
    ("layout", "starts", "changes", "error", "message"),
    [
        (
            rs.Layout("striped", 8, 2),
            (0,),
            {},
            rs.LayoutError,
            "use zigzag or contiguous",
        ),
        (
            rs.Layout("zigzag", 16, 4),
            (0,),
            {},
            rs.LayoutError,
            "for 4 ranks, the ring has 2",
        ),
        (
            CUSTOM,
            (0,),
            {},
            rs.UnsupportedError,
            "where one program serves all ranks; use contiguous or zigzag",
        ),
        (
            rs.Layout("zigzag", 8, 2),
            (1, 3),
            {},
            rs.UnsupportedError,
            "starts must be positions in increasing order",
        ),
        *long(
            (
                rs.Layout("zigzag", 8, 2),
                (0, 8),
                {},
                rs.LayoutError,
                "a document begins at 8, the layout has 8 tokens",
            )
        ),
        (
            rs.Layout("zigzag", 8, 2),
            (0,),
            {"beta": np.ones((2, 8, 3))},
            rs.UnsupportedError,
            r"beta \(2, 4, 3\)",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    layout, starts, changes, error, message
):
    given = arguments("gated delta rule", 8) | changes
    split = P(None, "sp")

    def local(*arrays: Any) -> Any:
        return recurrence.delta_rule(*arrays, layout=layout, starts=starts)

    on_mesh = jax.shard_map(
        local, mesh=mesh(sp=2), in_specs=(split,) * 5, out_specs=split
    )
    with pytest.raises(error, match=message):
        on_mesh(*(jnp.asarray(x, jnp.float32) for x in given.values()))
