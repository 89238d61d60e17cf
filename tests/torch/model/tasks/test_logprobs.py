"""Log-probabilities of targets on the ring against those of whole logits on one process, with every gradient."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import logsigmoid

import ringspan as rs
from ringspan.measure.machine import allocated_bytes
from tests.cases import few, long
from tests.torch.model.layers.blockwise.test_head import alter, halve
from tests.torch.models import build, relative, tokens, whole_gradients
from tests.torch.test_parallelize import restarting

EVEN = {"vocab_size": 98}
# Frequencies by the whole row, which is longer than that; no text in it is.
DYNAMIC = {
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}


def dpo(logprobs: Tensor) -> Tensor:
    """Rows in turn chosen and rejected, beside a reference that is near; the last of an odd number has no other."""
    sums = logprobs.sum(1)
    rows = torch.arange(len(sums))
    ratios = (1 - 2 * (rows % 2)) * (sums - (sums.detach() + rows - 0.5))
    return -torch.stack(
        [logsigmoid(0.5 * pair.sum()) for pair in ratios.split(2)]
    ).sum()


def grpo(logprobs: Tensor) -> Tensor:
    """A clipped ratio with some of the tokens beyond the clip, averaged over those with a target."""
    # nowhere in a batch without targets, whose loss is NaN then, and its gradients 0
    mask = logprobs != 0
    old = logprobs.detach() + 0.3 * torch.randn(
        logprobs.shape, generator=torch.Generator().manual_seed(5)
    )
    advantages = torch.linspace(1.0, -0.7, len(logprobs))[:, None]
    ratio = (logprobs - old).exp()
    each = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(each * mask).sum() / mask.sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"dpo": dpo, "grpo": grpo}


def whole_batch(
    rows: int, length: int, labels: str, documents: Any = None
) -> dict[str, Tensor]:
    ids = tokens(rows, length)
    targets = ids.clone()
    match labels:
        case "few":  # the last ranks of a contiguous layout have no target at all
            targets[:, 5:] = -100
        case "completions":
            targets[:, : length // 3] = -100
            targets[0, length // 2] = -100
        case "none":
            targets[:] = -100
    batch = {"input_ids": ids, "labels": targets}
    if "padded" in labels:
        mask = torch.ones_like(ids)
        # a row on the left, one of padding alone, one on both sides
        mask[-1, length - 4 :] = 0
        if labels == "padded left":
            mask[0, :9] = mask[1] = mask[-1, :3] = 0
        # The last real token of a row may have a target, as an end of text that is marked as padding.
        targets[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)
        batch["attention_mask"] = mask
    if documents:
        batch["position_ids"] = restarting(documents)
    return batch


def prepared(kind: str, changes: dict[str, Any] | None, how: str | None) -> Any:
    model = build(kind, **changes or {})
    if how:
        alter(model, how)
    return model


def expected_logprobs(
    model: Any, batch: dict[str, Tensor], documents: Any = None
) -> Tensor:
    ids, labels = batch["input_ids"], batch["labels"]
    if documents:  # each alone: not every model of transformers tells its masks of packed positions
        parts = [
            row.split(lengths) for row, lengths in zip(ids, documents, strict=True)
        ]
        logits = torch.stack(
            [
                torch.cat([model(input_ids=part[None]).logits[0] for part in row])
                for row in parts
            ]
        )
    else:
        logits = model(input_ids=ids, attention_mask=batch.get("attention_mask")).logits
    targets = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], -100)), 1)
    picked = (
        logits.float()
        .log_softmax(-1)
        .gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    )
    return torch.where(targets == -100, 0.0, picked)


def one_process(
    loss: str, replicate: int, kind: str, batch: dict[str, Tensor], **options: Any
) -> Any:
    model = prepared(kind, options.get("changes"), options.get("how"))
    logprobs = expected_logprobs(model, batch, options.get("documents"))
    sum(LOSSES[loss](part) for part in logprobs.chunk(replicate)).backward()  # type: ignore[union-attr]
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}


def on_ring(
    mesh: DeviceMesh,
    loss: str,
    kind: str,
    batch: dict[str, Tensor],
    layout: Any,
    given: Any,
) -> Any:
    options = dict(given)
    options.pop("documents", None)
    model = rs.parallelize(
        prepared(kind, options.pop("changes", None), options.pop("how", None)),
        mesh,
        layout=layout,
        **options,
    )
    mine = mesh["replicate"].get_local_rank()
    part = {name: x.chunk(mesh["replicate"].size())[mine] for name, x in batch.items()}
    local = rs.shard_batch(part, mesh, layout=layout)
    with torch.no_grad():
        evaluated = rs.token_logprobs(model, local)
    with torch.inference_mode():
        inferred = rs.token_logprobs(model, local)
    logprobs = rs.token_logprobs(model, local)
    LOSSES[loss](logprobs).backward()
    assert (
        not evaluated.requires_grad
        and torch.equal(evaluated, logprobs)
        and torch.equal(inferred, logprobs)
    )
    return mine, logprobs.detach(), whole_gradients(model)


CASES: list[tuple[Any, ...]] = [
    # kind, ranks, replicate, tp, layout, length, rows of all replicas, labels, options
    (
        "llama",
        3,
        1,
        1,
        "balanced",
        37,
        2,
        "all",
        {"documents": [[5, 20, 1, 11], [30, 7]]},
    ),
    ("llama", 4, 1, 1, "contiguous", 41, 3, "few", {"checkpoint": "full"}),
    ("llama", 4, 1, 1, "zigzag", 3, 1, "all", {}),  # two ranks hold nothing but padding
    ("llama", 2, 1, 1, "zigzag", 30, 2, "none", {}),
    ("gpt2", 3, 1, 1, "zigzag", 37, 3, "padded left", {}),
    ("mistral-window", 2, 1, 1, "balanced", 37, 3, "padded left", {"changes": DYNAMIC}),
    (
        "llama-tied",
        4,
        1,
        2,
        "striped",
        37,
        2,
        "all",
        {"changes": EVEN, "loss_chunk_vocabulary": 13},
    ),
    ("gemma2", 3, 1, 1, "zigzag", 33, 2, "completions", {"loss_chunk_vocabulary": 31}),
    (
        "mixtral",
        2,
        1,
        1,
        "zigzag",
        37,
        2,
        "all",
        {"changes": {"num_local_experts": 4, "output_router_logits": True}},
    ),
    (
        "llama",
        2,
        1,
        1,
        "zigzag",
        37,
        2,
        "completions",
        {"z_loss": 0.1, "label_smoothing": 0.2},
    ),
    (
        "llama",
        4,
        2,
        1,
        "striped",
        30,
        4,
        "all",
        {"documents": [[9, 21], [30], [3, 3, 24], [3, 3, 24]]},
    ),
    (
        "llama",
        2,
        1,
        1,
        "zigzag",
        37,
        3,
        "completions",
        {"how": "adapted", "loss_chunk_tokens": 5},
    ),
    ("llama", 4, 2, 1, "zigzag", 37, 2, "completions", {"how": "hook with parameters"}),
]
MORE: list[tuple[Any, ...]] = [
    (
        "llama",
        3,
        1,
        1,
        "striped",
        50,
        2,
        "completions",
        {"checkpoint": "none", "loss_chunk_tokens": 5},
    ),
    ("llama", 2, 1, 1, "striped", 37, 3, "padded", {}),
    (
        "gemma2",
        2,
        1,
        2,
        "zigzag",
        37,
        2,
        "completions",
        {"changes": EVEN, "loss_chunk_tokens": 5},
    ),
    ("granite", 2, 1, 1, "zigzag", 37, 2, "completions", {"loss_chunk_tokens": 7}),
    ("gemma2", 3, 1, 1, "striped", 37, 2, "completions", {"how": "hook"}),
]


@pytest.mark.parametrize(
    (
        "kind",
        "ranks",
        "replicate",
        "tp",
        "layout",
        "length",
        "rows",
        "labels",
        "options",
        "loss",
    ),
    [
        *few(
            ((*case, loss) for case, loss in zip(CASES, cycle(LOSSES), strict=False)),
            3,
        ),
        *long(
            *((*case, loss) for case, loss in zip(MORE, cycle(LOSSES), strict=False))
        ),
    ],
)
def test_logprobs_and_gradients_are_those_of_whole_logits(
    pool, kind, ranks, replicate, tp, layout, length, rows, labels, options, loss
):
    batch = whole_batch(rows, length, labels, options.get("documents"))
    expected, gradients = one_process(loss, replicate, kind, batch, **options)
    results = pool.run(
        on_ring, ranks, loss, kind, batch, layout, options, replicate=replicate, tp=tp
    )
    for replica, logprobs, found in results:
        assert logprobs.dtype == torch.float32
        # the same numbers on every rank
        assert torch.equal(logprobs, results[replica * ranks // replicate][1])
        truth = expected.chunk(replicate)[replica]
        assert (
            torch.equal(logprobs == 0, truth == 0)
            and not torch.signbit(logprobs[truth == 0]).any()
        )
        assert relative(logprobs, truth) < 1e-6 or labels == "none"
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (found[name] is None) == (gradient is None), name
            if gradient is not None:
                assert relative(found[name], gradient) < 1e-5 or not (
                    gradient.any() or found[name].any()
                ), name


def packed_and_changed(
    mesh: DeviceMesh, batch: dict[str, Tensor], other: dict[str, Tensor]
) -> list[Tensor]:
    model = rs.parallelize(build("llama"), mesh)
    return [
        rs.token_logprobs(model, rs.shard_batch(each, mesh)).detach()
        for each in (batch, other)
    ]


def test_a_change_of_one_document_changes_no_other(pool):
    batch = whole_batch(1, 37, "all", [[12, 25]])
    other = batch | {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, :12] = 96 - other["input_ids"][0, :12]
    for one, changed in pool.run(packed_and_changed, 2, batch, other):
        assert torch.equal(one[:, 12:], changed[:, 12:]) and not torch.equal(
            one[:, :12], changed[:, :12]
        )


def two_calls(
    mesh: DeviceMesh,
    chosen: dict[str, Tensor],
    rejected: dict[str, Tensor],
    evaluates: bool,
) -> Any:
    """One loss of two calls, and an evaluation before its backward pass; then a training step's own loss."""
    model = rs.parallelize(build("llama"), mesh)
    sums = [
        rs.token_logprobs(model, rs.shard_batch(each, mesh)).sum(1)
        for each in (chosen, rejected)
    ]
    if evaluates:
        with torch.no_grad():
            rs.token_logprobs(model, rs.shard_batch(chosen, mesh))
    (
        -logsigmoid(0.1 * (sums[0] - sums[1])).sum()
        + model(**rs.shard_batch(chosen, mesh)).loss
    ).backward()
    return whole_gradients(model)


@pytest.mark.parametrize("evaluates", [*long(False), True])
def test_one_loss_of_several_calls(pool, evaluates):
    """Of other lengths, as preferences are."""
    chosen, rejected = whole_batch(2, 37, "completions"), whole_batch(2, 22, "all")
    model = build("llama")
    sums = [expected_logprobs(model, each).sum(1) for each in (chosen, rejected)]
    (-logsigmoid(0.1 * (sums[0] - sums[1])).sum() + model(**chosen).loss).backward()
    for found in pool.run(two_calls, 3, chosen, rejected, evaluates):
        for name, parameter in model.named_parameters():
            assert relative(found[name], parameter.grad) < 1e-5, name


def in_bfloat16(mesh: DeviceMesh, how: str, batch: dict[str, Tensor]) -> Any:
    model = rs.parallelize(
        build("llama"), mesh, compute_dtype=torch.bfloat16 if how == "compute" else None
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=how != "compute"):
        logprobs = rs.token_logprobs(model, rs.shard_batch(batch, mesh))
        loss = dpo(logprobs)
        if how == "autocast, backward inside":
            loss.backward()
    if how != "autocast, backward inside":
        loss.backward()
    return logprobs.detach(), whole_gradients(model)


@pytest.mark.parametrize(
    "how", ["compute", "autocast, backward inside", "autocast, backward outside"]
)
def test_computing_in_bfloat16_gives_float32(pool, how):
    batch = whole_batch(2, 37, "completions")
    expected, gradients = one_process("dpo", 1, "llama", batch)
    for logprobs, found in pool.run(in_bfloat16, 2, how, batch):
        assert (
            logprobs.dtype == torch.float32
            and 1e-6 < relative(logprobs, expected) < 5e-3
        )
        for name, gradient in gradients.items():
            assert (
                found[name].dtype == torch.float32
                and relative(found[name], gradient) < 5e-2
            ), name


def held(mesh: DeviceMesh, rows: int, trains: bool) -> int:
    """Bytes of one call and its backward pass, in a model whose logits would be far larger than all else."""
    model = rs.parallelize(
        build("llama", vocab_size=30_000, hidden_size=16), mesh, loss_chunk_tokens=64
    )
    local = rs.shard_batch(whole_batch(rows, 256, "all"), mesh)

    def call() -> None:
        with torch.set_grad_enabled(trains):
            logprobs = rs.token_logprobs(model, local)
        if trains:
            logprobs.sum().backward()
            model.zero_grad()

    call()
    return allocated_bytes(call)


@pytest.mark.parametrize("trains", [*long(False), True])
def test_whole_logits_never_exist(pool, trains):
    (one, *_), (three, *_) = pool.run(held, 2, 1, trains), pool.run(held, 2, 3, trains)
    logits = 2 * 128 * 30_000 * 4  # of the two further rows on this rank
    assert three - one < 0.1 * logits


def mixed_up(mesh: DeviceMesh, how: str) -> None:
    model = rs.parallelize(build("llama"), mesh)
    batch = whole_batch(2, 16, "all")
    local = rs.shard_batch(batch, mesh)
    match how:
        case "some for the loss":
            model(**local) if mesh["ring"].get_local_rank() == 1 else rs.token_logprobs(
                model, local
            )
        case "not sharded":
            rs.token_logprobs(model, batch)
        case "no batch on one rank":
            given: Any = None if mesh["ring"].get_local_rank() == 1 else local
            rs.token_logprobs(model, given)
        case "no targets":
            rs.token_logprobs(
                model, rs.shard_batch({"input_ids": batch["input_ids"]}, mesh)
            )
        case "no ring":
            rs.token_logprobs(build("llama"), local)
        case "other layout":
            rs.token_logprobs(model, rs.shard_batch(batch, mesh, layout="striped"))
        case "other layout, documents of one length":
            even = batch | {"position_ids": torch.arange(4).repeat(2, 4)}
            rs.token_logprobs(model, rs.shard_batch(even, mesh, layout="contiguous"))
        case "other batches":
            rows = whole_batch(
                2, 16, "all" if mesh["ring"].get_local_rank() == 1 else "completions"
            )
            rs.token_logprobs(model, rs.shard_batch(rows, mesh))
        case "asked by hand":
            model(**local, ring_asked="token_logprobs")


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (
            "some for the loss",
            rs.PeerMismatch,
            "rank 0: token_logprobs, rank 1: a forward pass",
        ),
        (
            "not sharded",
            rs.UnsupportedError,
            "what rs.shard_batch returned, and no labels",
        ),
        (
            "no batch on one rank",
            rs.UnsupportedError,
            "make the batch with rs.shard_batch",
        ),
        (
            "no targets",
            rs.UnsupportedError,
            "token_logprobs needs targets; give rs.shard_batch labels",
        ),
        (
            "no ring",
            rs.UnsupportedError,
            "needs what rs.parallelize returned, got a LlamaForCausalLM",
        ),
        (
            "other layout",
            rs.LayoutError,
            "position_ids are not those of the layout zigzag",
        ),
        (
            "other layout, documents of one length",
            rs.LayoutError,
            "split by another layout than zigzag, or for another",
        ),
        ("other batches", rs.PeerMismatch, "different labels"),
        ("asked by hand", rs.UnsupportedError, "does not take 'ring_asked'"),
    ],
)
def test_what_is_refused_is_refused_on_every_rank(pool, how, error, message):
    for outcome in pool.outcomes(mixed_up, 2, how):
        assert (
            isinstance(outcome, error)
            and message in str(outcome)
            and "\n" not in str(outcome)
        )


def split_by_hand(
    mesh: DeviceMesh, batch: dict[str, Tensor], layout: Any
) -> tuple[Tensor, Tensor]:
    model = rs.parallelize(build("llama"), mesh, layout=layout)
    local = rs.shard_batch(batch, mesh, layout=layout)
    own = {name: x for name, x in local.items() if not name.endswith("digest")}
    with torch.no_grad():
        return rs.token_logprobs(model, own), rs.token_logprobs(model, local)


@pytest.mark.parametrize("layout", ["contiguous", "balanced"])
def test_a_batch_that_somebody_else_has_split_needs_no_digests(pool, layout):
    batch = whole_batch(2, 15, "all", [(5, 5, 5), (3, 12)])
    for own, local in pool.run(split_by_hand, 2, batch, layout):
        assert torch.equal(own, local)


def late_hook_with_tp(mesh: DeviceMesh) -> None:
    model = rs.parallelize(build("llama", **EVEN), mesh)
    model.lm_head.register_forward_hook(halve)
    rs.token_logprobs(model, rs.shard_batch(whole_batch(1, 16, "all"), mesh))


def test_a_hook_on_a_split_head_is_refused(pool):
    for outcome in pool.outcomes(late_hook_with_tp, 2, tp=2):
        assert isinstance(outcome, rs.UnsupportedError) and "use tp=1" in str(outcome)
