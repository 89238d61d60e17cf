"""What is kept, computed again, chunked and offloaded changes no loss and no gradient: each alone and all together."""

import resource
import signal
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.torch.engine.attention import op as attention
from ringspan.torch.model.memory import offload
from ringspan.torch.model.memory.offload import Store
from tests.cases import long
from tests.torch.models import build, relative, tokens, whole_gradients

LENGTH = 37
BLOCKS = {
    "loss_chunk_tokens": 5,
    "loss_chunk_vocabulary": 30,
    "feedforward_chunk_tokens": 3,
    "norm_chunk_tokens": 3,
}
OPTIONS: list[dict[str, Any]] = [
    {"checkpoint": "none"},
    {"checkpoint": "none", "feedforward_chunk_tokens": 3, "norm_chunk_tokens": 3},
    {"checkpoint": "full", "loss_chunk_vocabulary": 30},
    {"checkpoint": "attention", "feedforward_chunk_tokens": 0, "norm_chunk_tokens": 0},
    {"checkpoint": "full", "offload": "activations"},
    {"checkpoint": "attention", "offload": "activations"},
    {"checkpoint": "full", "layers_per_checkpoint": 2},
    {"checkpoint": "attention", "layers_per_checkpoint": 2},
    {
        "checkpoint": "full",
        "layers_per_checkpoint": 2,
        "offload": "activations",
        **BLOCKS,
    },
    {
        "checkpoint": "attention",
        "layers_per_checkpoint": 2,
        "offload": "activations",
        **BLOCKS,
    },
]


def step(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    out = model(**batch)
    out.loss.backward()
    return {"loss": out.loss.detach(), "gradients": whole_gradients(model)}


def ring_steps(mesh: DeviceMesh, kind: str) -> list[Any]:
    """A step with each set of options; how often the ring ran forward, and how much went to the store."""
    ids = tokens(2, LENGTH)
    results = []
    for options in OPTIONS:
        stored: list[int] = []
        put = Store.put

        def counting(
            self: Store, tensor: Any, put: Any = put, stored: Any = stored
        ) -> Any:
            parked = put(self, tensor)
            stored.append(0 if parked is tensor else tensor.nbytes)
            return parked

        with (
            mock.patch.object(offload, "MIN_BYTES", 0),
            mock.patch.object(Store, "put", counting),
            mock.patch.object(
                attention, "forward", side_effect=attention.forward
            ) as forward,
        ):
            model = rs.parallelize(build(kind), mesh, **options)
            result = step(
                model, rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
            )
        results.append(
            {**result, "ring_forwards": forward.call_count, "stored_bytes": sum(stored)}
        )
    return results


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("gemma3_text", 2),
        *long(("llama-tied", 2), *product(("llama-tied", "gemma3_text"), (1, 4))),
    ],
)
def test_options_alone_and_together_keep_loss_and_gradients(pool, kind, ranks):
    ids = tokens(2, LENGTH)
    expected = step(build(kind), {"input_ids": ids, "labels": ids})
    layers, local_tokens = 2, 2 * -(-LENGTH // (2 * ranks)) * 2
    for rank in pool.run(ring_steps, ranks, kind):
        for options, result in zip(OPTIONS, rank, strict=True):
            assert relative(result["loss"], expected["loss"]) < 1e-6, options
            for name, gradient in expected["gradients"].items():
                assert relative(result["gradients"][name], gradient) < 1e-6, (
                    options,
                    name,
                )
            again, segment = (
                options["checkpoint"] == "full",
                options.get("layers_per_checkpoint", 1),
            )
            # In a segment of two, the first layer once more for the input of the second.
            assert (
                result["ring_forwards"]
                == layers * (2 if again else 1) + (segment - 1) * again
            ), options
            outputs = layers * local_tokens * 64 * 4
            inputs = outputs // segment
            lse = layers * local_tokens * 4 * 4
            if "offload" not in options:
                assert result["stored_bytes"] == 0
            elif again:
                assert result["stored_bytes"] >= inputs
            else:
                assert result["stored_bytes"] >= inputs + outputs + lse


def extras(mesh: DeviceMesh) -> Any:
    ids = tokens(2, LENGTH)
    model = rs.parallelize(
        build("llama"), mesh, z_loss=0.01, label_smoothing=0.1, loss_chunk_vocabulary=40
    )
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    with torch.no_grad():
        evaluated = model.eval()(**batch).loss
    return step(model.train(), batch) | {"evaluated": evaluated}


def test_z_loss_and_label_smoothing_are_those_of_the_whole_batch(pool):
    ids, model = tokens(2, LENGTH), build("llama")
    logits, targets = (
        model(input_ids=ids).logits[:, :-1].flatten(0, 1),
        ids[:, 1:].flatten(),
    )
    plain = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    loss = plain + 0.01 * logits.logsumexp(-1).square().mean()
    loss.backward()
    for result in pool.run(extras, 2):
        assert (
            relative(
                result["evaluated"], torch.nn.functional.cross_entropy(logits, targets)
            )
            < 1e-6
        )
        assert relative(result["loss"], loss) < 1e-6
        for name, p in model.named_parameters():
            assert relative(result["gradients"][name], p.grad) < 5e-6, name


def test_the_store_gives_back_what_it_was_given(tmp_path):
    store = Store(min_bytes=8, folder=str(tmp_path))
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(n, 3, generator=generator).to(d)
        for n, d in ((7, torch.float32), (5, torch.bfloat16))
    ]
    given.append(torch.randn(4, 6, generator=generator).T)
    kept = [x.clone() for x in given]
    parked = [store.put(x) for x in given]
    for x in given:
        x.zero_()  # the memory is free for others
    assert not any(isinstance(x, torch.Tensor) for x in parked)
    assert store.parked_bytes == sum(x.nbytes for x in given)
    for x, away in reversed(list(zip(kept, parked, strict=True))):
        for _ in range(2):
            back = store.get(away)
            assert torch.equal(back, x) and back.dtype == x.dtype
            back.zero_()
    assert list(tmp_path.iterdir()) == [], "files without names"
    for small in (
        torch.zeros(1),
        torch.nn.Parameter(torch.zeros(9)),
        torch.zeros(9, dtype=torch.int64),
    ):
        assert store.put(small) is small and store.get(small) is small


def test_what_was_put_away_before_is_fetched_ahead(tmp_path, monkeypatch):
    fetched: list[int] = []
    monkeypatch.setattr(
        offload._Mapped, "fetch", lambda self: fetched.append(int(self._view[0]))
    )
    store = Store(min_bytes=1, folder=str(tmp_path))
    parked = [store.put(torch.full((4,), float(number))) for number in range(6)]
    store.get(parked[5])
    assert fetched == [4, 3, 2]
    store.get(parked[4])
    assert fetched == [4, 3, 2, 3, 2, 1], "and never what is no longer wanted"


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Store(min_bytes=1, folder=str(tmp_path / "nowhere")).put(torch.zeros(4))


def test_a_disk_without_room_is_an_error(tmp_path):
    """Not a bus error: a limit on the size of files stands for the end of the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    store, handler = (
        Store(min_bytes=1, folder=str(tmp_path)),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(
            rs.ConfigError, match=r"no room for 4,194,304 bytes in .*set TMPDIR"
        ):
            store.put(torch.zeros(1 << 20))
        small = torch.randn(1 << 10)
        assert torch.equal(store.get(store.put(small)), small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
