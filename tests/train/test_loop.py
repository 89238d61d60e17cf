"""Training end to end: the same losses however the work is split, and a folder that transformers opens."""

import itertools
import json
import math
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringspan.cli.main import main
from ringspan.core.errors import ConfigError
from ringspan.torch.data.padding import IGNORED
from ringspan.train.config.tables import OptimizerConfig, TrainConfig
from ringspan.train.data.documents import scan_documents
from ringspan.train.data.sequences import BatchOrder, build_data
from ringspan.train.job import _matmul_flops, learning_rate, prepare
from ringspan.train.loop import Observer, train
from ringspan.train.model import build_model, load_model_config, load_tokenizer
from tests.cases import long
from tests.every_model.hybrids import hybrid_config
from tests.train.runs import losses, metrics, plain_steps, settings, train_on


def drawn(mesh, config):
    """The first random number and the sum of the weights that a rank has, ready to step."""
    job = prepare(config)
    weights = sum(
        float(p.detach().full_tensor().double().sum()) for p in job.model.parameters()
    )
    return float(torch.rand(())), weights


def test_ranks_draw_random_numbers_of_their_own_from_the_seed(pool, text):
    """What dropout takes from the tokens of one rank, it need not take from those of another."""
    first, again = (
        pool.run(drawn, 4, settings(text, "drawn", mesh={"ring": 2, "replicate": 2}))
        for _ in range(2)
    )
    other = pool.run(
        drawn, 4, settings(text, "drawn", mesh={"ring": 2, "replicate": 2}, seed=1)
    )
    assert first == again
    assert len({number for number, _ in first + other}) == 8
    assert len({weights for _, weights in first}) == 1


def measured(mesh):
    """What all ranks make together, and when this one came, began to measure, and ended, before which all began."""
    time.sleep(0.1 * dist.get_rank())
    times = [time.monotonic()]

    def measure(device, dtype):
        times.append(time.monotonic())
        dist.barrier()
        times.append(time.monotonic())
        return 1.0

    return _matmul_flops(torch.device("cpu"), torch.float32, measure), times


def test_ranks_measure_how_fast_they_are_at_the_same_time(pool):
    """Ranks of a CPU that measured in turn would each find all of it their own."""
    results = pool.run(measured, 4)
    assert [total for total, _ in results] == 4 * [4.0]
    came, began, ended = zip(*(times for _, times in results), strict=True)
    assert max(came) < min(began) and max(began) < min(ended)


@pytest.fixture(scope="module")
def alone(text, pool):
    """One process through the command itself: four examples a step, in four micro-steps.

    With the pool, so that the worker that has it trains once for all tests.
    """
    folder = text / "alone.toml"
    config = settings(text, "alone", optimizer={"accumulation_steps": 4})
    values = json.loads(config.model_dump_json(exclude_none=True))
    folder.write_text(as_toml(values))
    argv, sys.argv = sys.argv, ["ringspan", "train", str(folder), "--nproc", "1"]
    try:
        with pytest.raises(SystemExit) as exit_:
            main()
    finally:
        sys.argv = argv
    assert exit_.value.code == 0
    return text / "alone"


def as_toml(values: dict, prefix: str = "") -> str:
    plain = {
        name: value for name, value in values.items() if not isinstance(value, dict)
    }
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
    for name, value in tables.items():
        lines += [f"[{prefix}{name}]", as_toml(value, f"{prefix}{name}.")]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *long(
            (
                "ring of 4",
                {
                    "memory": {"checkpoint": "auto", "activation_bytes": 1 << 30},
                    "optimizer": {"accumulation_steps": 4},
                },
            ),
            (
                "heads over 2, in folds",
                {
                    "mesh": {"tp": 2},
                    "memory": {"feedforward_chunk_tokens": 7, "folds": 2},
                    "optimizer": {"accumulation_steps": 2, "batch_size": 2},
                },
            ),
        ),
        (
            "2 x 2",
            {
                "mesh": {"replicate": 2},
                "profile": True,
                "attention": {"layout": "striped"},
                "memory": {
                    "checkpoint": "full",
                    "layers_per_checkpoint": 2,
                    "loss_chunk_tokens": 7,
                },
                "optimizer": {"accumulation_steps": 2},
            },
        ),
    ],
)
def test_losses_do_not_depend_on_how_the_work_is_split(
    pool, text, alone, name, changes
):
    pool.run(train_on, 4, settings(text, name, **changes))
    expected = losses(alone)
    assert len(expected) == 3 + 2
    assert losses(text / name) == pytest.approx(expected, rel=2e-6)
    first, last = load(text / name / "model"), load(alone / "model")
    for weight, other in zip(first.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-3, atol=1e-4)
    if changes.get("profile"):
        is_drawn(text / name / "profile")


def is_drawn(folder: Path) -> None:
    """A profiled step of two micro-steps."""
    files = ["memory.png", "profile.json", "report.html", "timeline.png"]
    assert sorted(path.name for path in folder.iterdir()) == files
    profiles = json.loads((folder / "profile.json").read_text())
    phases = [name for name, _ in profiles[1]["phases"]]
    assert [each["rank"] for each in profiles] == [0, 1, 2, 3]
    assert phases == ["forward", "loss", "backward"] * 2 + ["optimizer"]


@torch.no_grad()
def loss_of_documents(config: TrainConfig, step: int) -> float:
    """What one step costs before anything is learned: a plain model reads one document of a sequence at a time."""
    model_config = load_model_config(config)
    model = build_model(config.model, model_config)
    data = build_data(
        config,
        load_tokenizer(
            config.model, model_config, scan_documents(config.data).documents
        ),
    )
    batch = (
        config.optimizer.batch_size
        * config.optimizer.accumulation_steps
        * config.mesh.replicate
    )
    total, num_targets, num_documents = 0.0, 0, 0
    for index in (
        BatchOrder(len(data.train), config.seed, batch, 1, 1)
        .step_indices(step - 1)
        .ravel()
        .tolist()
    ):
        sequence = {
            name: torch.from_numpy(value) for name, value in data.train[index].items()
        }
        starts = (sequence["position_ids"] == 0).nonzero()[:, 0].tolist()
        for first, last in itertools.pairwise([*starts, None]):
            tokens, targets = (
                sequence[name][first:last] for name in ("input_ids", "shift_labels")
            )
            logits = model(tokens[None]).logits[0]
            total += float(
                torch.nn.functional.cross_entropy(
                    logits, targets, reduction="sum", ignore_index=IGNORED
                )
            )
            num_targets += int((targets != IGNORED).sum())
        num_documents += len(starts)
    assert num_documents > batch
    return total / num_targets


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [{}, {"mesh": {"replicate": 2}, "attention": {"layout": "striped"}}],
)
def test_separate_documents_do_not_see_each_other(pool, text, changes):
    name, short = f"separate {len(changes)}", text / "short"
    short.mkdir(exist_ok=True)
    for number in range(60):
        (short / f"{number}.txt").write_text(
            f"document {number} says " + "so and " * (number % 7)
        )
    optimizer = {"batch_size": 2, "accumulation_steps": 2}
    data = {
        "paths": str(short),
        "sequence_length_tokens": 61,
        "eval_fraction": 0.2,
        "documents": "separate",
    }
    config = settings(text, name, optimizer=optimizer, data=data, **changes)
    pool.run(train_on, 4, config)
    found = losses(text / name)
    assert len(found) == 3 + 2 and found[3] < found[0]
    assert found[0] == pytest.approx(loss_of_documents(config, 1), rel=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_models_that_choose_keys_train_as_one_process(pool, text, kind):
    """With 32 heads no scores of the index are equal, of which transformers takes any."""
    init = hybrid_config(kind, vocab_size=300, index_n_heads=32).to_dict()
    model = {"init": "scratch", "tokenizer": "train", "config": init}
    config = settings(
        text, kind, model=model, mesh={"replicate": 2}, optimizer={"batch_size": 2}
    )
    pool.run(train_on, 4, config)
    model_config = load_model_config(config)
    data = build_data(
        config,
        load_tokenizer(
            config.model, model_config, scan_documents(config.data).documents
        ),
    )
    expected = plain_steps(
        config, build_model(config.model, model_config).train(), data.train
    )
    assert [
        line["loss"] for line in metrics(text / kind) if "loss" in line
    ] == pytest.approx(expected, rel=2e-6)


def numbers_summed_over_ranks(mesh, config):
    counted, sum_up = [], dist.all_reduce

    def counted_sum(tensor, *args, **kwargs):
        counted.append(tensor.numel())
        return sum_up(tensor, *args, **kwargs)

    dist.all_reduce = counted_sum
    try:
        train(config)
    finally:
        dist.all_reduce = sum_up
    # gradients, and not flags and losses
    return sum(number for number in counted if number > 100)


def test_replicas_add_their_gradients_up_once_a_step(pool, text):
    def summed(micro_steps):
        optimizer = {"accumulation_steps": micro_steps}
        config = settings(
            text,
            f"{micro_steps} micro-steps",
            mesh={"replicate": 2},
            optimizer=optimizer,
            steps=2,
        )
        return pool.run(numbers_summed_over_ranks, 4, config)

    once = summed(1)
    assert summed(2) == once
    assert min(once) > 1000


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_result_is_an_ordinary_hugging_face_folder(alone):
    model, tokenizer = (
        load(alone / "model"),
        AutoTokenizer.from_pretrained(alone / "model"),
    )
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.use_cache
    prompt = tokenizer("chapter 3 line", return_tensors="pt")
    assert (
        model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1]
        == prompt["input_ids"].shape[1] + 3
    )
    assert not list(alone.glob("*.tmp-*"))


def test_metrics_say_what_the_readme_says(alone):
    first = metrics(alone)[0]
    names = (
        "step loss grad_norm lr tokens_per_second matmul_utilization peak_bytes seconds"
    )
    assert set(first) == set(names.split())
    assert first["loss"] == pytest.approx(math.log(300), rel=0.05)
    assert first["peak_bytes"] > 1 << 20
    assert list((alone / "tensorboard").iterdir())


def test_a_run_can_start_from_its_result(pool, text, alone):
    again = settings(text, "again", model={"path": str(alone / "model")})
    pool.run(train_on, 4, again)
    assert losses(text / "again")[0] < losses(alone)[0]


def test_learning_rate_warms_up_and_decays_to_its_minimum():
    schedule = OptimizerConfig(
        learning_rate=1.0, warmup_steps=4, min_learning_rate_ratio=0.1
    )
    rates = [learning_rate(step, 20, schedule) for step in range(1, 21)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))
    assert learning_rate(
        1, 1, OptimizerConfig(warmup_steps=0, learning_rate=1.0)
    ) == pytest.approx(0.1)


def said_and_curve(mesh, config):
    lines = []
    train(config, Observer(noticed=lines.append))
    return lines


SEPARATE = {"sequence_length_tokens": 45, "documents": "separate"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "data", "attention"),
    [
        *long(("balanced", {}, {"layout": "balanced"})),
        ("flops", {"balance": "flops"}, {"layout": "balanced"}),
    ],
)
def test_balanced_work_trains_the_same_model(pool, text, name, data, attention):
    common = {
        "mesh": {"ring": 2, "replicate": 2},
        "optimizer": {"batch_size": 2, "accumulation_steps": 2},
    }
    (text / name).mkdir()
    for number, lines in enumerate((1, 60, 2, 3, 1, 90, 4, 5, 2, 30)):
        (text / name / f"{number}.txt").write_text(
            "".join(f"{line} of {number}\n" for line in range(lines))
        )
    paths = {"paths": str(text / name), "eval_fraction": 0.1}
    name += " run"
    pool.run(
        said_and_curve,
        4,
        settings(text, f"{name} not", data=paths | SEPARATE, **common),
    )
    config = settings(
        text, name, data=paths | SEPARATE | data, attention=attention, **common
    )
    lines, *_ = pool.run(said_and_curve, 4, config)
    assert losses(text / name) == pytest.approx(losses(text / f"{name} not"), rel=1e-5)
    balance = [line for line in lines if line.startswith("data.balance moves")]
    assert len(balance) == ("balance" in data)
    if balance:
        after, before = (float(number) for number in re.findall(r"\d\.\d+", balance[0]))
        assert 1 <= after < before


def test_what_cannot_be_balanced_is_refused(text):
    paths = {"paths": str(text), "sequence_length_tokens": 45}
    with pytest.raises(
        ConfigError,
        match='documents = "pack" all take the same attention; set documents = "separate"',
    ):
        settings(text, "alike", data=paths | {"balance": "flops"})
