"""What a caller may pass to attention, sharding and the loss: each kind of thing is right, or refused by one line."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import ringspan as rs
from ringspan.core.messages.numbers import integer
from ringspan.torch.engine.transport.agreement import one_at_a_time
from tests.torch.engine.attention.test_op import PLAIN, tensors
from tests.torch.models import relative
from tests.torch.standins import OF_CUDA
from tests.torch.views import VECTORS, VIEWS


def operator(*tensors):
    return torch.ops.ringspan.ring_attention(*tensors, *PLAIN)


def as_given(view, grads=True):
    """q, k, v and dout as leaves, or not, that lie as a view does; and the same numbers in float64, contiguous."""
    seen = [view(x) for x in tensors(8)]
    plain = [
        x.double().clone(memory_format=torch.contiguous_format).requires_grad_(grads)
        for x in seen
    ]
    return [x.detach().requires_grad_(grads) for x in seen], plain


@pytest.mark.parametrize("view", VIEWS)
def test_the_operator_reads_every_view_and_traces_as_it_computes(view):
    (q, k, v, dout), exact = as_given(VIEWS[view])
    torch.library.opcheck(
        torch.ops.ringspan.ring_attention.default,
        (q, k, v, *PLAIN),
        test_utils="test_faketensor",
    )
    out, _ = operator(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *exact[:3], is_causal=True, enable_gqa=True
    )
    assert relative(out, expected) < 3e-6
    ours, theirs = (
        torch.autograd.grad(x, inputs, d, retain_graph=True)
        for x, inputs, d in (
            (out, (q, k, v), dout.detach()),
            (expected, exact[:3], exact[3].detach()),
        )
    )
    # some views let a gradient cancel to nothing
    whole = torch.cat([x.detach().flatten() for x in theirs]).norm()
    assert (
        max(float((a - b).norm() / whole) for a, b in zip(ours, theirs, strict=True))
        < 3e-6
    )


@pytest.mark.long
def test_it_compiles_with_views():
    compiled = torch.compile(
        lambda q, k, v: rs.ring_attention(q, k, v), fullgraph=True, backend="aot_eager"
    )
    for view in ("fused, numbers interleaved", "expanded tokens"):
        (q, k, v, dout), _ = as_given(VIEWS[view])
        # all that it checks
        torch.library.opcheck(
            torch.ops.ringspan.ring_attention.default, (q, k, v, *PLAIN)
        )
        found = []
        for attend in (compiled, rs.ring_attention):
            out = attend(q, k, v)
            found.append((out, *torch.autograd.grad(out, (q, k, v), dout.detach())))
        assert all(
            torch.equal(a, b) and a.stride() == b.stride()
            for a, b in zip(*found, strict=True)
        )


@pytest.mark.parametrize("vector", VECTORS)
def test_slopes_and_sinks_may_be_views(vector):
    q, k, v, _ = tensors(8)
    slopes, sinks = (
        VECTORS[vector](torch.tensor([0.1, 0.2, 0.3, 0.4])).detach() for _ in range(2)
    )
    found = []
    for a, b in (
        (slopes, sinks),
        (slopes.clone(), sinks.clone(memory_format=torch.contiguous_format)),
    ):
        b.requires_grad_()
        out = rs.ring_attention(q, k, v, slopes=a, sinks=b)
        found.append((out, *torch.autograd.grad(out.sin().sum(), b)))
    assert max(map(relative, *found)) < 1e-6


def test_a_view_of_which_torch_negates_the_numbers_later():
    pair = torch.randn(2, 4, 8, 16, dtype=torch.complex64).conj()
    assert pair.imag.is_neg()
    _, k, v, _ = tensors(8)
    assert torch.equal(
        rs.ring_attention(pair.imag, k, v),
        rs.ring_attention(pair.imag.resolve_neg(), k, v),
    )


@pytest.mark.parametrize(
    "attend",
    [rs.ring_attention, lambda *x: operator(*x)[0]],
    ids=["public", "operator"],
)
def test_forward_mode_is_refused_and_not_zero(attend):
    q, k, v, dout = tensors(8)
    with (
        forward_ad.dual_level(),
        pytest.raises(rs.UnsupportedError, match="forward-mode derivative"),
    ):
        attend(q, forward_ad.make_dual(k, torch.ones_like(k)), v)
    out = attend(q.requires_grad_(), k, v)
    with (
        forward_ad.dual_level(),
        pytest.raises(rs.UnsupportedError, match="forward-mode derivative"),
    ):
        torch.autograd.grad(out, q, forward_ad.make_dual(dout, dout))


@pytest.mark.parametrize("kind", ["jvp", "jacfwd", "grad", "vjp", "hessian"])
def test_transformations_of_torch_func_are_refused(kind):
    q, k, v, _ = tensors(8)
    transform, message = (
        getattr(torch.func, kind),
        "forward-mode" if kind in ("jvp", "jacfwd") else "torch.func",
    )

    def attention(x):
        return rs.ring_attention(x, k, v).sin().sum()

    def loss(x):
        return rs.blockwise_cross_entropy(
            x.flatten(0, 2), torch.ones(9, 16), torch.zeros(64).long()
        )

    for called in (attention, loss):
        with pytest.raises(rs.UnsupportedError, match=message):
            if kind in ("jvp", "vjp"):
                transform(called, *((q,), (q,)) if kind == "jvp" else (q,))
            else:
                transform(called)(q)


def test_compiled_forward_mode_is_refused():
    q, k, v, _ = tensors(8)

    def tangent(q):
        return torch.func.jvp(lambda x: rs.ring_attention(x, k, v), (q,), (q,))

    compiled = torch.compile(tangent, backend="eager")
    with pytest.raises(ValueError, match="forward-mode derivative"):
        compiled(q)


def test_a_second_derivative_is_refused_and_the_first_is_not():
    q, k, v, dout = tensors(8)
    q.requires_grad_()
    (expected,) = torch.autograd.grad(rs.ring_attention(q, k, v), q, dout)
    (once,) = torch.autograd.grad(
        rs.ring_attention(q, k, v), q, dout, create_graph=True
    )
    assert torch.equal(once, expected)
    with pytest.raises(
        rs.UnsupportedError, match="ring_attention is differentiated once"
    ):
        once.sum().backward()
    with pytest.raises(
        rs.UnsupportedError, match="blockwise_cross_entropy is differentiated once"
    ):
        # Its gradient would be a constant, so that a penalty on it would have none.
        total = rs.blockwise_cross_entropy(
            q.flatten(0, 2), torch.ones(9, 16), torch.zeros(64).long()
        )
        torch.autograd.grad(total, q, create_graph=True)


def test_vmap_computes_each_slice():
    q, k, v, _ = tensors(8)
    several = torch.stack((q, q.flip(2))).requires_grad_()
    with warnings.catch_warnings():
        # torch says that it goes through them one by one
        warnings.simplefilter("ignore")
        out = torch.vmap(lambda x: rs.ring_attention(x, k, v))(several)
    alone = torch.stack([rs.ring_attention(x, k, v) for x in several])
    assert torch.equal(out, alone)
    assert torch.equal(
        *(torch.autograd.grad(x.sin().sum(), several)[0] for x in (out, alone))
    )


def test_inference_mode_and_the_meta_device():
    q, k, v, _ = tensors(8)
    with torch.inference_mode():
        inside = rs.ring_attention(q.clone(), k, v)
    assert torch.equal(inside, rs.ring_attention(q, k, v))
    assert rs.ring_attention(*(x.to("meta") for x in (q, k, v))).shape == q.shape


def test_threads_of_one_process_may_each_compute_their_own():
    q, k, v, dout = tensors(32)
    expected = rs.ring_attention(q, k, v)

    def work(_):
        out = rs.ring_attention(q.clone().requires_grad_(), k, v)
        out.backward(dout)
        return torch.equal(out, expected)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(work, range(15), timeout=60))


def while_another_thread_attends(mesh):
    group = mesh["ring"].get_group()
    q, k, v, _ = tensors(8)
    with (
        ThreadPoolExecutor(1) as thread,
        one_at_a_time(group),
        pytest.raises(rs.UnsupportedError) as error,
    ):
        thread.submit(rs.ring_attention, q, k, v, group=group).result(60)
    assert "two threads compute attention over one process group" in str(error.value)
    return rs.ring_attention(q, k, v, group=group).shape == q.shape


def test_two_threads_over_one_group_are_refused(pool):
    assert pool.run(while_another_thread_attends, 2) == [True] * 2


def as_mesh(mesh):
    q, k, v, _ = tensors(8)
    layout = rs.Layout("zigzag", 16, 2)
    out = [
        rs.ring_attention(q, k, v, group=group)
        for group in (mesh["ring"], mesh["ring"].get_group())
    ]
    whole = [
        rs.unshard(out[0], layout, group, 2)
        for group in (mesh["ring"], mesh["ring"].get_group())
    ]
    return torch.equal(*out) and torch.equal(*whole)


def test_a_mesh_of_one_dimension_is_its_group(pool):
    assert pool.run(as_mesh, 2) == [True] * 2


NO_GROUP = [
    "group is a mesh of 2 dimensions ('replicate', 'ring'); pass one of them, as in mesh[\"ring\"]",
    "group must be a process group, a mesh of one dimension or None, got 2 (int)",
    "group must be a process group, a mesh of one dimension or None, got '",
    "this rank is not in the group",
    "the process group was destroyed (dist.destroy_process_group)",
    "the mesh has ranks [1, 0] along its axis 0",
]


def no_group(mesh):
    q, k, v, _ = tensors(8)
    destroyed = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    dist.destroy_process_group(destroyed)
    descending = DeviceMesh("cpu", [1, 0], _init_backend=False)
    without_me = dist.GroupMember.NON_GROUP_MEMBER
    texts = []
    for group in (
        mesh,
        2,
        mesh["ring"].get_group().group_name,
        without_me,
        destroyed,
        descending,
    ):
        with pytest.raises((rs.UnsupportedError, rs.ConfigError)) as error:
            rs.ring_attention(q, k, v, group=group)
        with pytest.raises((rs.UnsupportedError, rs.ConfigError)):
            rs.unshard(q, rs.Layout("zigzag", 16, 2), group, 2)
        texts.append(str(error.value))
    return texts


def test_what_is_no_group_of_this_rank_is_refused(pool):
    for texts in pool.run(no_group, 2):
        assert all(
            message in text for text, message in zip(texts, NO_GROUP, strict=True)
        ), texts


def distributed_tensors(mesh):
    q, k, v, _ = tensors(8)
    whole = DTensor.from_local(k, mesh["ring"], [Replicate()])
    with pytest.raises(
        rs.UnsupportedError,
        match=r"k is a DTensor; pass this rank's part, k\.to_local\(\)",
    ):
        rs.ring_attention(q, whole, v, group=mesh["ring"].get_group())
    with pytest.raises(rs.UnsupportedError, match="x is a DTensor"):
        rs.shard(whole, rs.Layout("zigzag", 8, 2), 0, 2)


def test_distributed_tensors_are_refused(pool):
    pool.run(distributed_tensors, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"mask": rs.causal},
            rs.MaskError,
            r"mask is the function causal .* call it, as in mask=rs\.causal\(\)",
        ),
        (
            {"mask": torch.ones(8, 8)},
            rs.MaskError,
            r"got a Tensor of shape \(8, 8\); a matrix of pairs cannot be",
        ),
        (
            {"mask": np.ones((8, 8), bool)},
            rs.MaskError,
            r"got a ndarray of shape \(8, 8\)",
        ),
        (
            {"mask": True},
            rs.MaskError,
            "mask must be a mask, its text or None, got True",
        ),
        ({"mask": "casual"}, rs.MaskError, "unknown mask"),
        (
            {"mask": rs.Mask(rs.causal().regions * 2)},
            rs.MaskError,
            "two regions of the mask overlap: causal and",
        ),
        ({"layout": 3}, rs.LayoutError, "layout must be a name or a Layout, got 3"),
        (
            {"layout": None},
            rs.LayoutError,
            "layout must be a name or a Layout, got None",
        ),
        ({"layout": "spiral"}, rs.LayoutError, "unknown layout 'spiral'"),
        ({"layout": rs.Layout("zigzag", 8, 1, 2)}, rs.LayoutError, "2 members"),
        (
            {"layout": rs.Layout("zigzag", 16, 2)},
            rs.LayoutError,
            "for 2 ranks, the ring has 1",
        ),
        ({"layout": rs.Layout("zigzag", 9, 1)}, rs.LayoutError, "8 local tokens"),
        (
            {"key_layout": "zigzag"},
            rs.LayoutError,
            "key_layout must be a Layout or None, got 'zigzag'",
        ),
        (
            {"key_layout": rs.Layout("striped", 8, 1)},
            rs.LayoutError,
            "the keys' layout is striped, that of",
        ),
        ({"group": 3}, rs.UnsupportedError, "group must be a process group"),
        ({"scale": "1"}, rs.UnsupportedError, "scale must be a plain number, got '1'"),
        (
            {"scale": True},
            rs.UnsupportedError,
            "scale must be a plain number, got True",
        ),
        (
            {"scale": torch.tensor(0.5)},
            rs.UnsupportedError,
            "scale must be a plain number, got tensor",
        ),
        ({"scale": float("nan")}, rs.UnsupportedError, "scale must be finite"),
        (
            {"scale": -1.0, "kernel": "cpu"},
            rs.UnsupportedError,
            r"'cpu' cannot serve: it needs a scale above 0, this",
        ),
        ({"softcap": "1"}, rs.UnsupportedError, "softcap must be a plain number"),
        ({"softcap": False}, rs.UnsupportedError, "softcap must be a plain number"),
        ({"softcap": float("nan")}, rs.UnsupportedError, "softcap must be finite"),
        ({"softcap": -1.0}, rs.UnsupportedError, "softcap must be positive and finite"),
        ({"route": None}, rs.UnsupportedError, "route must be text, got None"),
        ({"route": "teleport"}, rs.UnsupportedError, "unknown route 'teleport'"),
        ({"comm_dtype": None}, rs.UnsupportedError, "unknown comm_dtype None"),
        (
            {"comm_dtype": "int8", "route": "pass-q"},
            rs.UnsupportedError,
            "comm_dtype='int8' is for keys and values",
        ),
        (
            {"gradient_comm_dtype": "int8"},
            rs.UnsupportedError,
            "gradient_comm_dtype 'int8'",
        ),
        ({"kernel": None}, rs.UnsupportedError, "unknown kernel None"),
        (
            {"kernel": "abacus"},
            rs.UnsupportedError,
            "unknown kernel 'abacus'; choose one of auto, cudnn",
        ),
        *(
            (
                {"kernel": kernel},
                rs.UnsupportedError,
                f"'{kernel}' cannot serve: it needs CUDA",
            )
            for kernel in OF_CUDA
        ),
        ({"sinks": [1.0] * 4}, rs.UnsupportedError, r"sinks must be a torch\.Tensor"),
        (
            {"sinks": torch.ones(4).int()},
            rs.UnsupportedError,
            "in floating point, got torch.int32",
        ),
        (
            {"sinks": torch.zeros(2)},
            rs.UnsupportedError,
            "sinks must be one number for each of the 4 query heads",
        ),
        ({"sinks": torch.ones(4, device="meta")}, rs.UnsupportedError, "on meta"),
        (
            {"slopes": torch.ones(4).long()},
            rs.UnsupportedError,
            "in floating point, got torch.int64",
        ),
        (
            {"slopes": torch.ones(4, requires_grad=True)},
            rs.UnsupportedError,
            "slopes are constants",
        ),
        (
            {"q": np.zeros((2, 4, 8, 16))},
            rs.UnsupportedError,
            r"q must be a torch\.Tensor, got a ndarray of shape",
        ),
        ({"q": None}, rs.UnsupportedError, r"q must be a torch\.Tensor, got None"),
        (
            {"q": torch.zeros(2, 4, 8, 16).to_sparse()},
            rs.UnsupportedError,
            "q is a sparse_coo tensor; pass a dense",
        ),
        (
            {"q": torch.zeros(2, 4, 8, 16, device="meta")},
            rs.UnsupportedError,
            "make them equal",
        ),
        ({"q": torch.zeros(0, 4, 8, 16)}, rs.UnsupportedError, "q is empty"),
        ({"q": torch.zeros(2, 4, 8)}, rs.UnsupportedError, "q must be"),
        (
            {"q": torch.zeros(2, 3, 8, 16)},
            rs.UnsupportedError,
            "2 key/value heads do not divide 3",
        ),
        ({"k": torch.zeros(2, 2, 8, 12)}, rs.UnsupportedError, "shapes do not fit"),
        ({"v": torch.zeros(1, 2, 8, 16)}, rs.UnsupportedError, "shapes do not fit"),
        (
            {"k": torch.zeros(2, 2, 8, 16).double()},
            rs.UnsupportedError,
            "make them equal",
        ),
        (
            dict.fromkeys("qkv", torch.zeros(1, 2, 8, 16).half()),
            rs.UnsupportedError,
            "float16 on CPU",
        ),
        (
            dict.fromkeys("qkv", torch.zeros(1, 2, 8, 16).int()),
            rs.UnsupportedError,
            "int32",
        ),
        (
            dict.fromkeys("qkv", torch.zeros(1, 2, 7, 16)),
            rs.LayoutError,
            "even number of local tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_arguments_of_another_kind_are_refused(change, error, message):
    given = dict(zip("qkv", tensors(8), strict=False)) | change
    with pytest.raises(error, match=message):
        rs.ring_attention(**given)


def test_nested_tensors_are_refused():
    q, k, v, _ = tensors(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype
        nested = torch.nested.nested_tensor(list(q), layout=torch.jagged)
    with pytest.raises(rs.UnsupportedError, match="q is a nested tensor"):
        rs.ring_attention(nested, k, v)


@pytest.mark.parametrize(
    "number",
    [4, np.int64(4), np.float32(4), 4.0, torch.tensor(4), np.array(4)],
    ids=repr,
)
def test_whole_numbers_of_every_kind_count(number):
    assert integer(number, "n", rs.MaskError) == 4
    assert rs.sliding_window(number) == rs.sliding_window(4)
    assert (
        rs.documents([number, 3]) == rs.documents((4, 3))
        and rs.chunked(2, length=number).spec == rs.chunked(2, length=4).spec
    )
    layout = rs.Layout("zigzag", number, np.int32(2))
    assert (
        layout == rs.Layout("zigzag", 4, 2)
        and type(layout.length) is type(layout.ranks) is int
    )


@pytest.mark.parametrize(
    "number",
    [
        True,
        np.bool_(True),
        torch.tensor(True),
        4.5,
        "4",
        None,
        [4],
        torch.tensor(4.0),
        float("inf"),
    ],
    ids=repr,
)
def test_what_is_no_whole_number_does_not(number):
    with pytest.raises(rs.MaskError, match="n must be an integer, got"):
        integer(number, "n", rs.MaskError)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x, layout: rs.shard(x, "zigzag", 0, 2),
            rs.LayoutError,
            "layout must be a Layout, got 'zigzag'",
        ),
        (
            lambda x, layout: rs.shard(x.numpy(), layout, 0, 2),
            rs.UnsupportedError,
            r"x must be a torch\.Tensor",
        ),
        (
            lambda x, layout: rs.shard(x, layout, 0, 7),
            rs.LayoutError,
            "dimension 7 is none of a tensor of shape",
        ),
        (
            lambda x, layout: rs.shard(x, layout, 2, 2),
            rs.LayoutError,
            "rank 2 is not in a layout of 2 ranks",
        ),
        (
            lambda x, layout: rs.shard(x, layout, 0.5, 2),
            rs.LayoutError,
            r"rank must be an integer, got 0\.5",
        ),
        (
            lambda x, layout: rs.unshard(x, "zigzag", None, 2),
            rs.LayoutError,
            "layout must be a Layout, got 'zigzag'",
        ),
        (
            lambda x, layout: rs.unshard(x[:, :, :4], layout, None, 2),
            rs.LayoutError,
            "for 2 ranks, the group has 1",
        ),
        (
            lambda x, layout: rs.unshard(x, layout, 3, 2),
            rs.UnsupportedError,
            "group must be a process group",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(tensors(8)[0], rs.Layout("zigzag", 8, 2))


def test_views_are_sharded_like_any_tensor():
    layout = rs.Layout("zigzag", 7, 2)
    for view in VIEWS.values():
        x = view(torch.randn(2, 4, 7, 6))
        plain = x.clone(memory_format=torch.contiguous_format)
        assert all(
            torch.equal(rs.shard(x, layout, rank, 2), rs.shard(plain, layout, rank, 2))
            for rank in range(2)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"targets": torch.arange(7)},
            r"hidden \(5, 4\), weight \(9, 4\), targets \(7,\)",
        ),
        ({"targets": torch.arange(3)}, r"targets \(3,\)"),
        (
            {"targets": torch.arange(5.0)},
            "targets must be int64 or int32, got torch.float32",
        ),
        (
            {"targets": torch.ones(5, dtype=torch.bool)},
            "targets must be int64 or int32, got torch.bool",
        ),
        ({"targets": [1, 2, 3, 4, 5]}, r"targets must be a torch\.Tensor"),
        ({"weight": torch.ones(9, 3)}, r"weight \(9, 3\)"),
        (
            {"weight": torch.ones(9, 4).double()},
            "weight is torch.float64, hidden is torch.float32",
        ),
        ({"weight": torch.ones(9, 4, device="meta")}, "weight is on meta"),
        ({"hidden": torch.ones(1, 5, 4)}, r"hidden \(1, 5, 4\)"),
        ({"hidden": torch.ones(5, 4).int()}, "in floating point"),
        ({"bias": torch.ones(3)}, r"bias \(3,\)"),
        ({"group": 3}, "group must be a process group"),
    ],
    ids=str,
)
def test_what_is_no_problem_of_a_loss_is_refused(change, message):
    whole = {
        "hidden": torch.ones(5, 4),
        "weight": torch.ones(9, 4),
        "targets": torch.arange(5),
    } | change
    with pytest.raises(rs.UnsupportedError, match=message):
        rs.blockwise_cross_entropy(**whole)


def test_a_loss_reads_every_view():
    for view in VIEWS.values():
        hidden, weight = (
            view(torch.randn(1, 1, n, 6))[0, 0].detach().requires_grad_()
            for n in (5, 9)
        )
        targets = torch.tensor([1, 0, 8, 0, -100, 0, 3, 0, 4, 0])[::2]
        total = rs.blockwise_cross_entropy(
            hidden, weight, targets, chunk_tokens=2, chunk_vocabulary=4
        )
        logits = hidden.double() @ weight.double().T
        expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        ours, theirs = (
            torch.autograd.grad(x, (hidden, weight)) for x in (total, expected)
        )
        whole = torch.cat([x.flatten() for x in theirs]).norm()
        assert relative(total, expected) < 1e-6
        assert (
            max(
                float((a - b).norm() / whole) for a, b in zip(ours, theirs, strict=True)
            )
            < 1e-6
        )
