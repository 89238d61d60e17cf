"""``benchmarks.memory``: a step's bytes by category against formulas."""

from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from benchmarks.memory import step_bytes
from tests.torch.models import build, tokens


def bytes_of_a_step(mesh: DeviceMesh, chunk: int) -> dict[str, int]:
    model = rs.parallelize(build("llama", vocab_size=4096), mesh, loss_chunk_tokens=chunk)
    ids = tokens(1, 512)
    counted = step_bytes(model, rs.shard_batch({"input_ids": ids, "labels": ids}, mesh))
    return counted | {"elements": sum(p.numel() for p in model.parameters())}


def test_the_categories_of_a_step(pool):
    for whole, chunked in zip(pool.run(bytes_of_a_step, 2, 1000), pool.run(bytes_of_a_step, 2, 8), strict=True):
        share = whole["elements"] * 4 / 2
        for category, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            assert whole[category] == chunked[category]
            assert abs(whole[category] / (times * share) - 1) < 0.02
        logits = 256 * 4096 * 4
        assert whole["temporaries"] - chunked["temporaries"] > 0.5 * logits
        assert whole["communication"] > 0 and whole["activations"] > 0
