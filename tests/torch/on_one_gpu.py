"""What two ranks that share one GPU do over NCCL, each in a process of its own: ``python -m tests.torch.on_one_gpu``.

NCCL lets them from 2.30 on, where NCCL_MULTI_RANK_GPU_ENABLE is set.
"""

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.torch.engine.attention.test_ring import Problem, gathered, relative
from tests.torch.models import build

ROUTES = ("ring", "ulysses:2")
MASKS = {
    "causal": rs.causal(),
    "window": rs.sliding_window(150),
    "documents": rs.documents([400, 7, 293, 301]),
}


def attention(mesh: DeviceMesh) -> dict[str, Any]:
    """Errors against float64, and whether five passes, with other work between, gave the same bits."""
    found: dict[str, Any] = {}
    for name, mask in MASKS.items():
        for route in ROUTES:
            problem = Problem(
                1001,
                mask,
                heads=4,
                groups=2,
                size=64,
                dtype=torch.bfloat16,
                device="cuda",
            )
            # else FlashAttention adds gradients up in any order
            torch.use_deterministic_algorithms(True)
            results = [_pass(problem, mesh, route) for _ in range(5)]
            torch.use_deterministic_algorithms(False)
            out, *gradients = (_whole(x, mesh) for x in results[0])
            expected = problem.out, *problem.gradients
            errors = list(map(relative, (out, *gradients), expected, problem.terms))
            apart = [
                max(float((one[i] - results[0][i]).abs().max()) for one in results[1:])
                for i in range(len(errors))
            ]
            found[f"{name} {route}"] = {"errors": errors, "apart": apart}
    return found


def _pass(problem: Problem, mesh: DeviceMesh, route: str) -> list[Tensor]:
    rank = mesh.get_local_rank("ring")
    layout = rs.Layout("zigzag", problem.length, 2)
    wholes = problem.q, problem.k, problem.v, problem.dout
    q, k, v, dout = (rs.shard(x, layout, rank, 2).contiguous() for x in wholes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    group = mesh["ring"].get_group()
    out = rs.ring_attention(
        q,
        k,
        v,
        group=group,
        layout=layout,
        mask=problem.mask,
        route=route,
        kernel="flash",
    )
    # What is freed now is soon somebody else's: a transfer that still reads it would show.
    noise = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    del noise
    return [out.detach(), *gradients]


def _whole(x: Tensor, mesh: DeviceMesh) -> Any:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous(), group=mesh["ring"].get_group())
    return gathered(parts, rs.Layout("zigzag", 1001, 2))


def training(mesh: DeviceMesh) -> dict[str, Any]:
    """Losses and gradient norms of three steps, with and without offload, and on one rank alone."""
    ids = torch.randint(0, 97, (2, 301), generator=torch.Generator().manual_seed(0))
    alone = rs.init_mesh(ring=1, replicate=2)
    one = {"kernel": "eager"}
    return {
        "one": _train(ids, alone, **one),
        "ring": _train(ids, mesh, **one),
        "offload": _train(ids, mesh, offload="activations", **one),
        "full": _train(ids, mesh, checkpoint="full", **one),
        "ulysses": _train(ids, mesh, route="ulysses:2", **one),
    }


def _train(ids: Tensor, mesh: DeviceMesh, **options: Any) -> list[list[float]]:
    torch.manual_seed(0)
    model = rs.parallelize(build("llama"), mesh, **options)
    # so large that rounding is no step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    # Two replicas of one rank have the same sequences, so that their mean is that of one.
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh, device="cuda")
    found = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        found.append([float(loss.detach()), float(norm)])
    return found


def handshake(mesh: DeviceMesh) -> dict[str, Any]:
    """What a rank is told whose mask differs from the other's."""
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    mask = rs.causal() if dist.get_rank() else rs.sliding_window(9)
    try:
        rs.ring_attention(q, q, q, group=mesh["ring"].get_group(), mask=mask)
    except rs.PeerMismatch as error:
        return {"error": str(error)}
    return {"error": None}


def watchdog(mesh: DeviceMesh) -> dict[str, Any]:
    """Rank 1 dies between two steps, and rank 0 waits for it in a kernel of NCCL."""
    ids = torch.randint(0, 97, (2, 301), generator=torch.Generator().manual_seed(0))
    # nothing to compile
    model = rs.parallelize(build("llama"), mesh, kernel="eager", watchdog=True)
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh, device="cuda")
    model(**batch).loss.backward()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os._exit(9)
    for _ in range(100):
        model(**batch).loss.backward()
        torch.cuda.synchronize()
    return {}


def run(check: str) -> None:
    """Do it as one of two ranks, whom the environment describes as torchrun does, and print what came of it."""
    torch.cuda.set_device(0)
    seconds = 30 if check == "watchdog" else 90
    dist.init_process_group(
        "nccl", device_id=torch.device("cuda:0"), timeout=timedelta(seconds=seconds)
    )
    found = globals()[check](rs.init_mesh(ring=2))
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(sys.argv[1])
