"""Going on: bit-equal to a run that was never stopped, on the same ranks, and the same tokens on any others."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.torch.runtime.forks import STOP_SIGNALS
from ringspan.train.config.tables import TrainConfig
from ringspan.train.loop import Observer, train
from tests.cases import long
from tests.train.runs import curve, settings

STEPS = 5


def config(folder: Path, name: str, **changes) -> TrainConfig:
    small = {
        "steps": STEPS,
        "optimizer": {"batch_size": 2} | changes.pop("optimizer", {}),
        "evaluation": {"every_steps": 2, "num_sequences": 2},
        "checkpoints": {"every_steps": 2, "keep": 9},
    }
    return settings(folder, name, **(small | changes))


def train_and_see(mesh, config, stop_after=None, number=signal.SIGTERM, rank=0):
    """Train; in the middle of it a rank may get a signal, twice. What happened, and what was said."""
    lines = []

    def stepped(metrics):
        if metrics.step == stop_after:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    result = train(config, Observer(stepped=stepped, noticed=lines.append))
    return result.steps, result.stopped_by, lines


def handlers_after_a_stop(mesh, config, then_exit):
    """Train until the first rank tells itself to stop; the handlers of stop signals then, which were the default."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    stop = Observer(stepped=lambda metrics: os.kill(os.getpid(), signal.SIGTERM))
    assert train(config, stop, then_exit=then_exit).stopped_by
    return [signal.signal(number, handler) for number, handler in before.items()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def uninterrupted(pool, text):
    pool.run(train_and_see, 4, config(text, "uninterrupted"))
    assert len(curve(text / "uninterrupted")) == 3 * STEPS + 3
    return text / "uninterrupted"


@pytest.mark.parametrize("stop_after", [*long(1, 4), 2])
def test_a_stopped_run_goes_on_bit_for_bit(pool, text, uninterrupted, stop_after):
    stopped = config(text, f"stopped {stop_after}")
    for steps, signalled, _ in pool.run(train_and_see, 4, stopped, stop_after):
        # The signal comes after the vote of its step, so the next one is the last.
        assert steps == stop_after + 1
        assert signalled or steps == STEPS
    run = text / f"stopped {stop_after}"
    assert (run / "checkpoints" / f"step_{stop_after + 1:08d}").is_dir()
    if stop_after + 1 < STEPS:
        assert not (run / "model").exists()
        (_, _, lines), *_ = pool.run(train_and_see, 4, stopped)
        assert any(
            line.startswith(f"resuming after step {stop_after + 1} from")
            for line in lines
        )
    assert curve(run) == curve(uninterrupted)
    assert equal(weights(run), weights(uninterrupted))


@pytest.mark.parametrize("then_exit", [*long(False), True])
def test_a_signal_after_the_save_does_not_take_the_exit_code(pool, text, then_exit):
    expected = signal.SIG_IGN if then_exit else signal.SIG_DFL
    for handlers in pool.run(
        handlers_after_a_stop, 4, config(text, f"exit {then_exit}"), then_exit
    ):
        assert handlers == [expected] * len(STOP_SIGNALS)


def state_of_a_step(mesh, config):
    """What a run in bfloat16 holds after a step, and the norm of its gradient counted in float64."""
    from ringspan.train.guard import Guard
    from ringspan.train.job import prepare
    from ringspan.train.signals import StopRequest

    job, norms = prepare(config), []

    def count(*_):
        gradients = [whole(parameter.grad) for parameter in job.model.parameters()]
        norms.append(
            float(
                torch.cat(
                    [gradient.double().flatten() for gradient in gradients]
                ).norm()
            )
        )

    job.optimizer.register_step_pre_hook(count)
    metrics, _ = job.step(1, Guard(config.guard, StopRequest(), job.device))
    kinds = {parameter.dtype for parameter in job.model.parameters()}
    kinds |= {
        value.dtype
        for state in job.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    }
    return kinds, metrics.grad_norm, norms[0]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def half(folder, name, **changes):
    """A run whose parameters are in bfloat16, and what layers compute."""
    before = config(folder, name, **changes)
    model = before.model.model_copy(
        update={"dtype": "bfloat16", "parameter_dtype": "bfloat16"}
    )
    return before.model_copy(update={"model": model})


@pytest.mark.parametrize(
    "changes", [*long({}, {"mesh": {"tp": 2}}), {"optimizer": {"on_host": True}}]
)
def test_bfloat16_parameters_train_with_a_float32_norm(pool, text, changes):
    unclipped = {"optimizer": {"clip_grad_norm": 0.0} | changes.get("optimizer", {})}
    outcomes = pool.run(state_of_a_step, 4, half(text, "norm", **changes | unclipped))
    for kinds, norm, expected in outcomes:
        assert kinds == {torch.bfloat16}
        assert norm == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_a_run_in_bfloat16_learns_alike(pool, text, uninterrupted):
    pool.run(train_and_see, 4, half(text, "half"))
    for (step, what), value in curve(uninterrupted).items():
        if what == "loss":
            assert curve(text / "half")[step, what] == pytest.approx(value, rel=0.03)
    assert curve(text / "half")[STEPS, "loss"] < 0.9 * curve(text / "half")[1, "loss"]
    assert {weight.dtype for weight in weights(text / "half").values()} == {
        torch.bfloat16
    }


def test_a_run_without_its_newest_checkpoint_uses_the_previous(
    pool, text, uninterrupted
):
    damaged = config(text, "damaged")
    pool.run(train_and_see, 4, damaged, 3)
    run = text / "damaged"
    shard = run / "checkpoints" / "step_00000004" / "rank_00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a line cut by a crash
    (_, _, lines), *_ = pool.run(train_and_see, 4, damaged)
    assert any(
        "skipped" in line and "step_00000004/rank_00002.safetensors" in line
        for line in lines
    )
    assert any(line.startswith("resuming after step 2 from") for line in lines)
    assert curve(run) == curve(uninterrupted)
    assert equal(weights(run), weights(uninterrupted))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "2 x 2",
            {
                "mesh": {"replicate": 2},
                "memory": {"folds": 3},
                "optimizer": {"batch_size": 1},
            },
        ),
        *long(
            ("heads over 2", {"mesh": {"tp": 2}}),
            ("striped", {"attention": {"layout": "striped"}}),
        ),
    ],
)
def test_another_mesh_or_layout_goes_on_with_the_same_tokens(
    pool, text, uninterrupted, name, changes
):
    pool.run(train_and_see, 4, config(text, f"moved {name}"), 2)
    (_, _, lines), *_ = pool.run(
        train_and_see, 4, config(text, f"moved {name}", **changes)
    )
    assert any("resuming after step 3" in line for line in lines)
    expected, found = curve(uninterrupted), curve(text / f"moved {name}")
    assert found.keys() == expected.keys()
    for (step, what), value in found.items():
        # bit-equal before, within rounding after; other tokens would differ in the second digit
        tolerance = 0 if step <= 3 else 1e-6 if what != "grad_norm" else 1e-5
        assert value == pytest.approx(expected[step, what], rel=tolerance, abs=0), (
            step,
            what,
        )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, ConfigError, "is finished at step 5; set steps above 5 to go on"),
        ({"seed": 3}, ConfigError, "holds a run with seed = 0, now it is 3"),
        (
            {"model": {"path": "elsewhere"}},
            ConfigError,
            "holds a run with model.path = null",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_on_all_ranks(
    pool, text, uninterrupted, changes, error, message
):
    outcomes = pool.outcomes(train_and_see, 4, config(text, "uninterrupted", **changes))
    assert all(
        isinstance(outcome, error) and message in str(outcome) for outcome in outcomes
    ), outcomes


@pytest.mark.long
def test_fewer_steps_and_no_valid_checkpoint_are_refused(pool, text):
    hopeless = config(text, "hopeless")
    pool.run(train_and_see, 4, hopeless, 2)
    for outcome in pool.outcomes(train_and_see, 4, config(text, "hopeless", steps=2)):
        assert isinstance(
            outcome, ConfigError
        ) and "has come to step 3, beyond steps = 2" in str(outcome)
    for manifest in (text / "hopeless" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    outcomes = pool.outcomes(train_and_see, 4, hopeless)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes), outcomes
    assert all("is not a manifest of ringspan" in str(outcome) for outcome in outcomes)


@pytest.mark.long
def test_more_steps_go_on_from_a_finished_run(pool, text):
    pool.run(train_and_see, 4, config(text, "longer", steps=2))
    (steps, _, lines), *_ = pool.run(train_and_see, 4, config(text, "longer", steps=3))
    assert steps == 3 and "steps = 3 (the run began with 2)" in lines
    assert [step for step, name in curve(text / "longer") if name == "loss"] == [
        1,
        2,
        3,
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh"), [("the same", {}), ("heads over 2", {"tp": 2})]
)
def test_moments_on_the_host_go_on_too(pool, text, uninterrupted, name, mesh):
    on_host = {"on_host": True}
    pool.run(train_and_see, 4, config(text, f"on host, {name}", optimizer=on_host), 2)
    pool.run(
        train_and_see, 4, config(text, f"on host, {name}", optimizer=on_host, mesh=mesh)
    )
    for step, loss in curve(uninterrupted).items():
        assert curve(text / f"on host, {name}")[step] == pytest.approx(
            loss, rel=1e-4
        ), step
