"""Models with states, convolutions or an index on the ring against themselves on one process: loss and gradients."""

from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ringspan as rs
from ringspan.core.step_config import StepConfig
from ringspan.torch.mechanisms.chosen_keys import chosen, indexed
from ringspan.torch.mechanisms.chosen_keys.modules import refuse_indexed
from ringspan.torch.model.support import refuse_unsupported
from ringspan.torch.model.view import view_of
from tests.cases import long
from tests.every_model.hybrids import HYBRIDS, INDEXED
from tests.every_model.tiny import MULTIMODAL, tiny_model
from tests.torch.engine.recurrence.models import build
from tests.torch.models import relative, whole_gradients
from tests.torch.test_parallelize import restarting


def batch_of(rows: int, length: int) -> Tensor:
    return torch.randint(
        3, 97, (rows, length), generator=torch.Generator().manual_seed(1)
    )


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).double(), targets[:, 1:].flatten()
    )


def one_process(
    kind: str, dtype: torch.dtype, ids: Tensor, documents: Any = None, **changes: Any
) -> Any:
    model = build(kind, dtype, **changes)
    lengths = documents or [[ids.shape[1]]] * len(ids)
    rows = [
        torch.cat(
            [
                model(input_ids=row[None, a:b]).logits[0]
                for a, b in pairwise((0, *accumulate(each)))
            ]
        )
        for row, each in zip(ids, lengths, strict=True)
    ]
    loss = losses(torch.stack(rows), ids)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def on_a_ring(
    mesh: Any, kind: str, dtype: torch.dtype, layout: str, ids: Tensor, options: Any
) -> Any:
    documents, accumulate_ = (
        options.pop("documents", None),
        options.pop("accumulate", 1),
    )
    mask = options.pop("mask", torch.ones_like(ids))
    model = rs.parallelize(
        build(kind, dtype, **options.pop("changes", {})), mesh, layout=layout, **options
    )
    replicate = mesh["replicate"].size()
    rows = torch.arange(len(ids)).view(accumulate_, replicate, -1)[
        :, mesh["replicate"].get_local_rank()
    ]
    loss = torch.zeros((), dtype=torch.float64)
    for each in rows:
        batch = {"input_ids": ids[each], "attention_mask": mask[each]}
        batch["labels"] = ids[each].masked_fill(
            mask[each] * mask[each].roll(1, 1) == 0, -100
        )
        if documents:
            batch["position_ids"] = restarting(documents)[each]
        part = rs.shard_batch(batch, mesh, layout=layout, folds=options.get("folds", 1))
        if accumulate_ > 1:
            part["num_items_in_batch"] = ids[:, 1:].numel()
        output = model(**part)
        output.loss.backward()
        loss = loss + output.loss.detach() + output.get("index_loss", 0.0)
    return loss, whole_gradients(model)


def worst(results: list[Any], expected: Any) -> float:
    """The largest relative error of the loss and of a gradient on any rank."""
    errors = [relative(loss, expected[0]) for loss, _ in results]
    for (name, gradient), (_, found) in product(expected[1].items(), results):
        assert found.keys() == expected[1].keys() and (gradient is None) == (
            found[name] is None
        ), name
        if gradient is not None:
            errors.append(relative(found[name], gradient))
    return max(errors)


LAYOUTS = [
    (2, "zigzag"),
    (3, "contiguous"),
    (4, "zigzag"),
    (1, "zigzag"),
    (4, "contiguous"),
    (3, "zigzag"),
]
KINDS = [*enumerate(HYBRIDS)]
CHOOSING = [*enumerate(INDEXED, 1)]  # of fewer keys than there are
APART = [KINDS[12]]
# Documents that start and end anywhere, among them ones that are shorter than a convolution and whole spans.
SHORT = [[2, 2, 27], [5, 26], [31], [30, 1]]
# the first of two ranks has no entry to norm
UNPOOLED = [
    [*[2] * 15, 1],
    [*[2] * 8, 15],
]
PACKED = [[7, 1, 2, 14, 3, 12], [39]], [[20, 19], [20, 19]], [[1, 38], [36, 3]]


@pytest.mark.parametrize(
    ("number", "kind"),
    [KINDS[14], *long(*CHOOSING, *(x for x in KINDS if x != KINDS[14]))],
)
def test_loss_and_gradients_equal_one_process_in_float64(pool, number, kind):
    ids = batch_of(2, 37)
    expected = one_process(kind, torch.float64, ids)
    ranks, layout = LAYOUTS[number % len(LAYOUTS)]
    assert (
        worst(
            pool.run(on_a_ring, ranks, kind, torch.float64, layout, ids, {}), expected
        )
        < 1e-9
    )


@pytest.mark.parametrize("kind", ["qwen3_next", *long("deepseek_v32", "deepseek_v3")])
def test_a_row_of_padding_alone_changes_no_other(pool, kind):
    ids, mask = batch_of(2, 37), torch.tensor([[0], [1]]).expand(2, 37)
    expected = one_process(kind, torch.float64, ids[1:])
    assert (
        worst(
            pool.run(on_a_ring, 2, kind, torch.float64, "zigzag", ids, {"mask": mask}),
            expected,
        )
        < 1e-9
    )


@pytest.mark.parametrize(
    "kind", [*long("deepseek_v4"), "minimax_m3_vl_text", "qwen4_exp_text"]
)
def test_padding_on_either_side_leaves_rows_as_they_are_alone(pool, kind):
    ids, model = batch_of(2, 37), build(kind, torch.float64)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 30:] = 0
    rows = [row[None, keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    parts = [
        losses(model(input_ids=row).logits, row) * (row.shape[1] - 1) for row in rows
    ]
    loss = sum(parts) / (mask.sum() - 2)
    loss.backward()
    expected = loss.detach(), {name: p.grad for name, p in model.named_parameters()}
    assert (
        worst(
            pool.run(on_a_ring, 2, kind, torch.float64, "zigzag", ids, {"mask": mask}),
            expected,
        )
        < 1e-9
    )


# The other ways to compute have packed documents with options below.
@pytest.mark.parametrize(
    ("number", "kind"),
    [*APART, *long(*(x for x in KINDS + CHOOSING if x not in APART))],
)
def test_packed_documents_equal_each_alone(pool, number, kind):
    ids, documents = batch_of(2, 39), PACKED[number % len(PACKED)]
    expected = one_process(kind, torch.float64, ids, documents)
    ranks, layout = LAYOUTS[(number + 2) % len(LAYOUTS)]
    found = pool.run(
        on_a_ring, ranks, kind, torch.float64, layout, ids, {"documents": documents}
    )
    assert worst(found, expected) < 1e-9


@pytest.mark.parametrize(
    ("number", "kind"),
    [KINDS[13], *long(*(x for x in KINDS if x != KINDS[13]))],
)
def test_float32_is_as_close_to_float64_as_one_process(pool, number, kind):
    ids = batch_of(1, 41)
    truth, plain = (
        one_process(kind, dtype, ids) for dtype in (torch.float64, torch.float32)
    )
    ranks, layout = LAYOUTS[(number + 4) % len(LAYOUTS)]
    found = pool.run(on_a_ring, ranks, kind, torch.float32, layout, ids, {})
    assert worst(found, truth) < 2 * worst([plain], truth) + 1e-6


@pytest.mark.parametrize(
    ("kind", "ranks", "replicate", "options"),
    [
        ("qwen3_5_text", 4, 2, {"accumulate": 2, "documents": SHORT}),
        *long(
            (
                "falcon_h1",
                3,
                1,
                {"layout": "balanced", "checkpoint": "full", "documents": SHORT},
            )
        ),
        ("kimi_linear", 2, 1, {"checkpoint": "none"}),
        (
            "glm_moe_dsa",
            3,
            1,
            {"layout": "balanced", "checkpoint": "full", "documents": SHORT},
        ),
        *long(
            ("deepseek_v32", 2, 1, {"layout": "striped", "checkpoint": "none"}),
            (
                "deepseek_v4",
                2,
                1,
                {"layout": "striped", "checkpoint": "full", "documents": SHORT},
            ),
            (
                "deepseek_v4",
                2,
                1,
                {"layout": "contiguous", "documents": UNPOOLED, "norm_chunk_tokens": 3},
            ),
            (
                "deepseek_v4",
                2,
                1,
                {"checkpoint": "full", "documents": UNPOOLED[:1] * 2},
            ),
            ("deepseek_v4", 4, 2, {"documents": UNPOOLED}),
            ("qwen4_exp_text", 3, 1, {"layers_per_checkpoint": 3, "documents": SHORT}),
        ),
        ("mamba2", 2, 1, {"offload": "activations"}),
        ("qwen3_next", 2, 1, {"folds": 3, "documents": SHORT}),
        ("bamba", 1, 1, {"folds": 4, "checkpoint": "full", "layout": "contiguous"}),
        *long(
            ("lfm2", 3, 1, {"folds": 2, "documents": SHORT, "layout": "contiguous"}),
            ("minimax", 2, 1, {"folds": 5, "layers_per_checkpoint": 2}),
            ("minimax", 3, 1, {"checkpoint": "full"}),
            ("hy_v4", 3, 1, {"layers_per_checkpoint": 3, "documents": SHORT}),
            ("deepseek_v2", 3, 1, {"documents": SHORT, "route": "bidirectional"}),
            ("lfm2", 2, 1, {"layers_per_checkpoint": 2}),
            (
                "axk1",
                3,
                1,
                {"layout": "balanced", "checkpoint": "full", "documents": SHORT},
            ),
            ("minicpm3", 3, 1, {"layout": "striped", "checkpoint": "none"}),
            ("youtu", 2, 1, {"layers_per_checkpoint": 2, "offload": "activations"}),
            ("jamba", 2, 1, {"accumulate": 2, "documents": SHORT}),
            ("nemotron_h", 2, 1, {"layers_per_checkpoint": 3, "checkpoint": "full"}),
        ),
    ],
)
def test_replicas_accumulation_and_checkpoints(pool, kind, ranks, replicate, options):
    ids = batch_of(max(2, replicate * options.get("accumulate", 1)), 31)
    if "documents" in options:
        options["documents"] = options["documents"][: len(ids)]
    expected, layout = (
        one_process(kind, torch.float64, ids, options.get("documents")),
        options.pop("layout", "zigzag"),
    )
    found = pool.run(
        on_a_ring, ranks, kind, torch.float64, layout, ids, options, replicate=replicate
    )
    assert worst(found, expected) < 1e-9


def two_at_once(mesh: Any) -> Any:
    """Gradients of a pass after which a shorter batch had one, then backward passes of both."""
    model = rs.parallelize(build("deepseek_v4", torch.float64), mesh)
    parts = [
        rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
        for ids in (batch_of(1, 37), batch_of(1, 9))
    ]
    loss = torch.stack([model(**part).loss for part in parts]).sum()
    loss.backward()
    return loss.detach(), whole_gradients(model)


def test_a_shorter_pass_before_backward_changes_no_recomputation(pool):
    (one, first), (other, second) = (
        one_process("deepseek_v4", torch.float64, batch_of(1, n)) for n in (37, 9)
    )
    total = {name: None if g is None else g + second[name] for name, g in first.items()}
    assert worst(pool.run(two_at_once, 2), (one + other, total)) < 1e-9


def without_an_index(mesh: Any, kind: str, *args: Any) -> Any:
    def never(*_: object) -> None:
        raise AssertionError("a choice among keys that are all attended to")

    with pytest.MonkeyPatch.context() as patched:
        for module in (chosen, indexed):
            patched.setattr(module, "attend", never)
        return on_a_ring(mesh, kind, torch.float64, *args)


@pytest.mark.parametrize(
    ("kind", "topk", "ranks"),
    [
        *long(("hy_v4", 7, 3)),
        ("minimax_m3_vl_text", 12, 2),
        *long(("deepseek_v32", 7, 2), ("qwen4_exp_text", 11, 3)),
    ],
)
def test_documents_that_an_index_sees_whole_take_the_ring(pool, kind, topk, ranks):
    ids, documents = batch_of(2, 29), [[*[topk] * (29 // topk), 29 % topk]] * 2
    expected = one_process(kind, torch.float64, ids, documents)
    found = pool.run(
        without_an_index,
        ranks,
        kind,
        "zigzag",
        ids,
        {"documents": documents, "checkpoint": "full"},
    )
    assert worst(found, expected) < 1e-9


@pytest.mark.parametrize(
    ("kind", "route", "ranks", "layout"),
    [
        ("deepseek_v32", "ulysses", 2, "zigzag"),
        *long(
            ("glm_moe_dsa", "pass-q", 3, "contiguous"),
            ("deepseek_v32", "pass-q", 2, "balanced"),
            ("hy_v4", "ulysses:2+ring", 4, "zigzag"),
        ),
    ],
)
def test_documents_that_an_index_sees_whole_take_any_route(
    pool, kind, route, ranks, layout
):
    ids, documents = batch_of(2, 29), [[7, 7, 7, 7, 1]] * 2  # an index chooses seven
    expected = one_process(kind, torch.float64, ids, documents)
    options = {"documents": documents, "route": route, "checkpoint": "full"}
    assert (
        worst(pool.run(without_an_index, ranks, kind, layout, ids, options), expected)
        < 1e-9
    )


def refused(mesh: Any, kind: str, options: Any) -> None:
    rs.parallelize(build(kind, torch.float32), mesh, **options)


@pytest.mark.parametrize(
    ("kind", "options", "tp", "message"),
    [
        ("qwen3_next", {"layout": "striped"}, 1, "use zigzag or contiguous"),
        ("qwen3_next", {}, 2, "use tp=1"),
        ("deepseek_v32", {"compile": "eager"}, 1, "use compile=False"),
        ("deepseek_v32", {"comm_dtype": "int8"}, 1, "use exact"),
        (
            "qwen4_exp_text",
            {"index_loss": "sparse"},
            1,
            "not of qwen4_exp_text; leave it out",
        ),
        (
            "qwen3_next",
            {"index_loss": "dense"},
            1,
            "has no index that chooses keys; leave it out",
        ),
        (
            "deepseek_v32",
            {"index_loss": "warm-up"},
            1,
            "unknown index_loss 'warm-up'; choose one of none, dense, sp",
        ),
    ],
)
def test_what_is_not_supported_raises_on_every_rank(pool, kind, options, tp, message):
    for outcome in pool.outcomes(refused, 2, kind, options, tp=tp):
        assert isinstance(outcome, rs.RingspanError)
        assert message in str(outcome)


def test_a_convolution_computed_by_its_module_is_refused():
    model = build("lfm2", torch.float32)
    model.model.layers[1].of_its_own = torch.nn.Conv1d(2, 2, 3)
    with pytest.raises(
        rs.UnsupportedError, match=r"layers.1.of_its_own is a convolution"
    ):
        refuse_unsupported(view_of(model))


def test_pools_without_a_tail_are_refused():
    view = view_of(tiny_model(f"glm5_next{MULTIMODAL}"))
    view.decoder.config.index_kpool_always_select_tail = False
    with pytest.raises(
        rs.UnsupportedError, match="the first tokens of a document would see none"
    ):
        refuse_indexed(view, StepConfig(), tp=1)


def twice(mesh: Any, kind: str) -> float:
    """The difference that a model on a ring makes to another one of its kind, outside of the ring."""
    ids = batch_of(1, 20)
    plain = build(kind, torch.float32)
    before = plain(input_ids=ids).logits
    rs.parallelize(build(kind, torch.float32), mesh)
    return float((plain(input_ids=ids).logits - before).abs().max())


@pytest.mark.parametrize("kind", ["qwen3_next", *long("minimax", "mamba")])
def test_models_that_are_on_no_ring_compute_what_they_did(pool, kind):
    assert pool.run(twice, 2, kind) == [0.0, 0.0]
