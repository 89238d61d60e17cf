"""A loop of accelerate's on a ring: losses, norms, schedules and weights of one process, checkpoints on any mesh."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

import ringspan as rs
from ringspan.hf import RingConfig, ring_accelerator
from ringspan.torch.model.saving import whole_weights
from ringspan.torch.model.weights.shards import join_slices
from tests.cases import long
from tests.hf.launchers import launched
from tests.hf.trainers import Examples
from tests.torch.model.memory import test_slices
from tests.torch.models import build, close_by_name, relative, whole

BATCHES = 6  # of four examples, two of them accumulated
ROWS = Examples(4 * BATCHES)


def parts(model: Any, examples: int) -> tuple[Any, Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return optimizer, DataLoader(ROWS, batch_size=examples), schedule


def one_process(replicas: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = build("llama")
    optimizer, loader, schedule = parts(model, 4)
    losses, norms = [], []
    for number, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        (loss / 2).backward()
        losses.append(float(loss.detach()))
        if number % 2 == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            # as accelerate does for processes of data parallelism
            optimizer.step()
            for _ in range(replicas):
                schedule.step()
            optimizer.zero_grad()
    return losses, norms, dict(model.named_parameters())


def loop(
    mesh: Any, sizes: dict[str, int], save: str | None = None, resume: str | None = None
) -> Any:
    config = RingConfig(**sizes)
    accelerator = ring_accelerator(config, gradient_accumulation_steps=2, cpu=True)
    model: Any = build("llama")
    model, *others = accelerator.prepare(model, *parts(model, 4 // config.replicate))
    optimizer, loader, schedule = others
    if resume:
        accelerator.load_state(resume)
        loader = accelerator.skip_first_batches(loader, 2)
    losses, norms = [], []
    for number, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(float(loss.detach()))
            if accelerator.sync_gradients:
                norms.append(
                    float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                )
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if save and number == 2:
            accelerator.save_state(save)
    gathered = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    state = whole_weights(model)
    accelerator.free_memory()
    return losses, norms, state, gathered, type(model).__name__


@pytest.mark.parametrize(
    "sizes", [{"ring": 2, "replicate": 2}, *long({"ring": 2, "tp": 2})]
)
def test_a_loop_equals_one_process(world, sizes):
    replicas = sizes.get("replicate", 1)
    losses, norms, weights = one_process(replicas)
    ranks = sizes["ring"] * replicas * sizes.get("tp", 1)
    found = world(ranks).run(loop, ranks, sizes)
    for found_losses, found_norms, _, gathered, kind in found:
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)
        assert gathered == list(range(replicas)) and kind.endswith("LlamaForCausalLM")
    for name, weight in weights.items():
        assert relative(found[0][2][name], weight.detach()) < 1e-5, name


def prepared_by_accelerate(mesh: Any) -> tuple[float, float]:
    """Loss and norm of a model on the ring that an accelerator of no ring was given."""
    model: Any = rs.parallelize(build("llama"), mesh)
    accelerator = Accelerator(cpu=True)
    same, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert same is model
    place = mesh["replicate"].get_local_rank() * 2
    ids = ROWS.ids[place : place + 2]
    loss = model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss
    accelerator.backward(loss)
    norm: Any = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), float(
        norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    )


def test_a_model_that_is_on_the_ring_is_left_alone(world):
    model, ids = build("llama"), ROWS.ids[:4]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for found in world(4).run(prepared_by_accelerate, 4, replicate=2):
        assert found == pytest.approx((float(loss), float(norm)), rel=1e-5)


@pytest.mark.long
def test_a_state_is_loaded_on_another_mesh(world, tmp_path):
    whole = world(4).run(loop, 4, {"ring": 2, "replicate": 2}, str(tmp_path / "state"))
    for losses, *_ in world(2).run(
        loop, 2, {"ring": 1, "replicate": 2}, None, str(tmp_path / "state")
    ):
        assert losses == pytest.approx(whole[0][0][2:], rel=1e-6)
    (tmp_path / "state" / "model.safetensors").unlink()
    for outcome in world(2).outcomes(
        loop, 2, {"ring": 2}, None, str(tmp_path / "state")
    ):
        assert (
            "model.safetensors: is missing; give a folder that save_state wrote"
            in str(outcome)
        )


def shared_out(mesh: Any) -> Any:
    accelerator = ring_accelerator(RingConfig(ring=2, replicate=2), cpu=True)
    with accelerator.split_between_processes(list(range(5))) as part:
        if torch.distributed.get_rank() == 1:
            accelerator.set_trigger()
        return part, accelerator.check_trigger(), accelerator.check_trigger()


def test_inputs_are_split_over_replicas_and_triggers_are_shared(world):
    assert world(4).run(shared_out, 4) == [
        (part, True, False) for part in [[0, 1, 2]] * 2 + [[3, 4]] * 2
    ]


def refused(mesh: Any, what: str) -> str:
    from accelerate import DistributedDataParallelKwargs, ParallelismConfig

    config = RingConfig(ring=2)
    with pytest.raises((rs.RingspanError, ValueError)) as caught:
        if what == "parallelism_config":
            ring_accelerator(
                config, parallelism_config=ParallelismConfig(cp_size=2), cpu=True
            )
        if what == "wrapper":
            ring_accelerator(
                config,
                kwargs_handlers=[
                    DistributedDataParallelKwargs(broadcast_buffers=False)
                ],
                cpu=True,
            )
        accelerator = ring_accelerator(config, cpu=True)
        model: Any = build("llama")
        if what == "other parameters":
            accelerator.prepare(model, torch.optim.AdamW(build("llama").parameters()))
        if what == "steps":
            optimizer = torch.optim.AdamW(model.parameters())
            model(input_ids=ROWS.ids[:1], labels=ROWS.ids[:1]).loss.backward()
            optimizer.step()
            accelerator.prepare(model, optimizer)
        getattr(accelerator, what)()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "parallelism_config",
            "parallelism_config is a second parallelism besides the ring; leave it out",
        ),
        (
            "wrapper",
            "DistributedDataParallelKwargs are for DistributedDataParallel, in which a model on a ring is not",
        ),
        (
            "other parameters",
            "the optimizer has parameters of no model that was prepared",
        ),
        (
            "steps",
            "the optimizer has taken steps; prepare it, with its model, before the first",
        ),
        (
            "gather_for_metrics",
            "accelerator.gather_for_metrics is not for a ring; model(**batch).loss is that of",
        ),
        ("join_uneven_inputs", "accelerator.join_uneven_inputs is not for a ring"),
        (
            "maybe_context_parallel",
            "accelerator.maybe_context_parallel is not for a ring",
        ),
    ],
)
def test_what_would_not_be_exact_raises(world, what, message):
    for said in world(2).run(refused, 2, what):
        assert message in said and "\n" not in said


@pytest.mark.parametrize(
    ("launcher", "ranks"), long(("accelerate", 2), ("accelerate, one process", 1))
)
def test_a_script_is_launched(tmp_path, launcher, ranks):
    out = launched(
        launcher,
        "accelerate_loop",
        tmp_path,
        "--steps",
        "4",
        "--length",
        "48",
        "--output",
        "state",
    )
    assert out.startswith("loss 4.") and f"on {ranks} rank" in out
    assert (tmp_path / "state" / "model.safetensors").is_file()


def stepped_slices(mesh, bound):
    """A clipped step of an optimizer that was made before its model was put on the ring."""
    model = test_slices.mixture("qwen3_moe")
    optimizer = test_slices.make_optimizer(model)
    config = RingConfig(mesh=mesh, expert_slices=3)
    accelerator = ring_accelerator(config, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    test_slices.loss_of(model, mesh, {}).backward()
    norm = accelerator.clip_grad_norm_(model.parameters(), bound)
    optimizer.step()
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return whole(norm), join_slices(weights)


def test_slices_of_experts_are_stepped_and_clipped(world):
    model, bound = test_slices.mixture("qwen3_moe"), 0.1
    optimizer = test_slices.make_optimizer(model)
    test_slices.alone(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
    assert norm > bound
    optimizer.step()
    for found, weights in world(2).run(stepped_slices, 2, bound):
        assert relative(found, norm) < 1e-9
        close_by_name(weights, dict(model.named_parameters()), 1e-9)
