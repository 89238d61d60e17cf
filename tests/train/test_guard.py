"""The guard: what is not finite is never applied, by nobody; spikes are found, and clean steps are left alone."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from ringspan.core.errors import PeerMismatch
from ringspan.train import guard as guards
from ringspan.train import job as jobs
from ringspan.train.config.tables import GuardConfig
from ringspan.train.data.sequences import BatchOrder
from ringspan.train.guard import Diverged, Guard, Spikes
from ringspan.train.job import prepare
from ringspan.train.loop import Observer, train
from ringspan.train.signals import StopRequest
from tests.cases import long
from tests.train.runs import curve, settings

WHERE = "model.layers.1.mlp.up_proj.weight"


def steps_with_nan(mesh, config, poisoned_steps, value):
    """A few steps; before some of them are judged, rank 2 has one gradient entry that is not finite."""
    job, stop = prepare(config), StopRequest()
    guard, told = Guard(config.guard, stop, job.device), []
    parameter = dict(job.model.named_parameters())[WHERE]
    original = jobs.gradient_norm

    def poison_and_measure(parameters):
        if step in poisoned_steps and dist.get_rank() == 2:
            parameter.grad.to_local().view(-1)[5] = value
        with CommDebugMode() as exchanges:
            total = original(parameters).full_tensor()
        assert exchanges.get_total_counts() == 1, (
            "the ranks sum up one norm, not one of each parameter"
        )
        return total

    jobs.gradient_norm = poison_and_measure
    try:
        for step in range(1, 4):
            before = [p.to_local().clone() for p in job.model.parameters()]
            counts = [float(state["step"]) for state in job.optimizer.state.values()]
            _, verdict = job.step(step, guard)
            unchanged = all(
                torch.equal(a, p.to_local())
                for a, p in zip(before, job.model.parameters(), strict=True)
            )
            unchanged &= counts == [
                float(state["step"]) for state in job.optimizer.state.values()
            ]
            told.append((verdict.apply, unchanged, verdict.problem))
    finally:
        jobs.gradient_norm = original
    return told


@pytest.mark.parametrize("value", [math.nan, *long(-math.inf)])
def test_all_ranks_skip_a_step_that_one_rank_spoils(pool, text, value):
    for told in pool.run(steps_with_nan, 4, settings(text, "nan"), [2], value):
        assert [applied for applied, _, _ in told] == [True, False, True]
        assert [unchanged for _, unchanged, _ in told] == [False, True, False]
        assert f"gradient of {WHERE} not finite on rank 2" in told[1][2] and told[1][
            2
        ].startswith("step 2: ")
        assert told[0][2] is told[2][2] is None


@pytest.mark.parametrize(
    ("changes", "poisoned", "message"),
    [
        *long(
            (
                {"non_finite": "stop"},
                [2],
                "step 2: .*on rank 2; the weights are those of step 1",
            )
        ),
        (
            {"max_skipped_steps": 1},
            [1, 2],
            "step 2: .*on rank 2; 1 steps before it were skipped already",
        ),
    ],
)
def test_all_ranks_stop_where_they_should(pool, text, changes, poisoned, message):
    outcomes = pool.outcomes(
        steps_with_nan, 4, settings(text, "nan", guard=changes), poisoned, math.nan
    )
    for outcome in outcomes:
        with pytest.raises(Diverged, match=message):
            raise outcome


def judge_apart(mesh):
    guard = Guard(GuardConfig(), StopRequest(), torch.device("cpu"))
    guard.judge(5 + (dist.get_rank() == 3), 1.0, 1.0, [], 0)


def test_ranks_at_different_steps_are_told(pool):
    for outcome in pool.outcomes(judge_apart, 4):
        assert isinstance(
            outcome, PeerMismatch
        ) and "different steps: from 5 to 6" in str(outcome)


def name_weights(mesh):
    bad = torch.full((3,), math.inf if dist.get_rank() == 1 else 0.0)
    weight = torch.nn.Parameter(DTensor.from_local(bad, mesh["ring"], run_check=False))
    weight.grad = torch.full_like(weight, math.nan)
    return guards._where([("embed", weight)])


def test_weights_are_named_before_the_gradients_that_they_spoil(pool):
    assert pool.run(name_weights, 4) == ["weights of embed not finite on rank 1"] * 4


def curves(seed: int, steps: int):
    """Losses and gradient norms as training gives them: a falling mean, noise of 8 %, heavy tails in the norm."""
    generator = random.Random(seed)
    for step in range(steps):
        loss = (2.0 + 4.0 * math.exp(-step / 60)) * math.exp(generator.gauss(0, 0.08))
        yield (
            loss,
            1.5
            * math.exp(generator.gauss(0, 0.3))
            * (1.0 if generator.random() > 0.01 else 2.5),
        )


@pytest.mark.parametrize("seed", range(5))
def test_500_clean_steps_raise_no_alarm_and_every_spike_does(seed):
    spikes, alarms, found = Spikes(100, GuardConfig().spike_zscore), [], 0
    for step, (loss, norm) in enumerate(curves(seed, 500)):
        alarms += [spikes.describe(loss, norm)]
        if step % 50 == 49:
            found += spikes.describe(loss * 3, norm) is not None
            found += spikes.describe(loss, norm * 40) is not None
        spikes.accept(loss, norm)
    assert alarms == [None] * 500
    assert found == 20


def test_a_constant_loss_is_no_reason_for_an_alarm():
    spikes = Spikes(100, 8.0)
    for _ in range(50):
        assert spikes.describe(2.0, 1.0) is None
        spikes.accept(2.0, 1.0)
    assert spikes.describe(2.1, 1.1) is None
    assert "loss 3 is" in (spikes.describe(3.0, 1.0) or "")


def train_with_a_spike(mesh, config, spike_step):
    """One rank alone sees a spike at a step, the first time it comes there."""
    lines, seen, places = [], [], []
    original, indices = Spikes.describe, BatchOrder.step_indices

    def describe(self, loss, norm):
        seen.append(loss)
        return "a spike" if len(seen) == spike_step and dist.get_rank() == 1 else None

    def noted(order, step):
        places.append(order.place(step))
        return indices(order, step)

    Spikes.describe, BatchOrder.step_indices = describe, noted
    try:
        train(config, Observer(noticed=lines.append))
    finally:
        Spikes.describe, BatchOrder.step_indices = original, indices
    return lines, places


def test_a_spike_rewinds_all_ranks_and_the_data_goes_on_after_it(pool, text):
    config = settings(
        text,
        "rewind",
        steps=6,
        checkpoints={"every_steps": 2},
        guard={"spike": "rewind"},
        evaluation={},
    )
    for _, places in pool.run(train_with_a_spike, 4, config, 5):
        # step 5 rewinds to 4 and is taken again, two sequences later
        assert places == [
            0,
            1,
            2,
            3,
            4,
            5,
            6,
        ]
    lines, _ = pool.run(
        train_with_a_spike,
        4,
        settings(text, "skip", steps=3, guard={"spike": "skip"}),
        2,
    )[0]
    assert lines == ["step 2: a spike on another rank"]
    steps = [step for step, name in curve(text / "rewind") if name == "loss"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_rewind_without_a_checkpoint_skips(pool, text):
    config = settings(
        text, "no rewind", checkpoints={"every_steps": 0}, guard={"spike": "rewind"}
    )
    lines, places = pool.run(train_with_a_spike, 4, config, 2)[0]
    assert places == [0, 1, 2]
    assert any("there is no checkpoint to rewind to; skipped" in line for line in lines)


def test_a_step_without_gradients_has_a_norm_of_zero():
    assert float(jobs.gradient_norm([])) == 0.0
