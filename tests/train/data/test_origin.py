"""A run keeps what it began with: its tokenizer, its text, its folder for itself, and its weights when all is full."""

import json
import os
import shutil
import signal
import subprocess
import sys
import types

import pytest
from transformers import AutoTokenizer

from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.torch.weights import writing
from ringspan.train.loop import Observer, train
from ringspan.train.run_folder.lock import RunLock
from tests.cases import long
from tests.cli.test_bad_input import refusal, workplace  # noqa: F401  workplace is a fixture
from tests.train.run_folder.test_resume import curve
from tests.train.test_loop import settings

STEPS = 4


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "origin"
    (folder / "text").mkdir(parents=True)
    for number in range(6):
        write(folder, number, f"chapter {number} says what the others say, and then it says it again\n" * 40)
    return folder


def write(folder, number, text):
    (folder / "text" / f"{number}.txt").write_text(text)


def run_settings(folder, steps=STEPS, every=2, **data):
    common = {"paths": str(folder / "text"), "sequence_length_tokens": 40, "eval_fraction": 0.0}
    return settings(
        folder,
        "run",
        steps=steps,
        data=common | data,
        optimizer={"warmup_steps": 1},
        evaluation={},
        checkpoints={"every_steps": every},
    )


def train_and_listen(mesh, config, free_bytes=None, of=(writing,)):
    """Train, on a disk with so much room for the model; what was said on this rank."""
    lines, real = [], shutil
    if free_bytes is not None:
        disk = types.SimpleNamespace(free=free_bytes)
        for module in of:
            module.shutil = types.SimpleNamespace(**vars(shutil) | {"disk_usage": lambda path: disk})
    try:
        train(config, Observer(noticed=lines.append))
    finally:
        for module in of:
            module.shutil = real
    return lines


def train_on_a_full_disk(mesh, config):
    from ringspan.train.checkpoints import checkpoint

    return train_and_listen(mesh, config, 1000, of=(writing, checkpoint))


def refused(pool, *args, error=ConfigError):
    """The one message with which all ranks refuse."""
    outcomes = pool.outcomes(train_and_listen, 4, *args)
    assert all(isinstance(outcome, error) for outcome in outcomes), outcomes
    [message] = {str(outcome) for outcome in outcomes}
    return message


def vocabulary(folder):
    return AutoTokenizer.from_pretrained(folder).get_vocab()


def test_a_changed_text_is_named_and_asks_for_a_flag_and_the_tokenizer_stays(pool, folder):
    pool.run(train_and_listen, 4, run_settings(folder))
    began, first = vocabulary(folder / "run" / "tokenizer"), curve(folder / "run")
    write(folder, 1, "zyxwv utsrq " * 300)
    write(folder, 9, "something new " * 100)
    (folder / "text" / "3.txt").unlink()
    message = refused(pool, run_settings(folder, 2 * STEPS))
    for part in ("another text", "1.txt is changed", "9.txt is new", "3.txt is gone", "data.on_change=continue"):
        assert part in message
    assert curve(folder / "run") == first
    lines, *_ = pool.run(train_and_listen, 4, run_settings(folder, 2 * STEPS, on_change="continue"))
    assert any("continuing with another text" in line and "1.txt is changed" in line for line in lines)
    assert vocabulary(folder / "run" / "tokenizer") == vocabulary(folder / "run" / "model") == began
    losses = [value for (_, name), value in curve(folder / "run").items() if name == "loss"]
    assert len(losses) == 2 * STEPS
    lines, *_ = pool.run(train_and_listen, 4, run_settings(folder, 3 * STEPS))  # the new text is the run's now
    assert not any("another text" in line for line in lines)


@pytest.mark.long
def test_the_same_text_elsewhere_goes_on_with_the_flag(pool, folder):
    pool.run(train_and_listen, 4, run_settings(folder))
    (folder / "text").rename(folder / "moved")
    moved = {"paths": str(folder / "moved")}
    assert "data.on_change=continue" in refused(pool, run_settings(folder, 2 * STEPS, **moved))
    lines, *_ = pool.run(train_and_listen, 4, run_settings(folder, 2 * STEPS, **moved, on_change="continue"))
    assert not any("another text" in line for line in lines)
    pool.run(train_and_listen, 4, run_settings(folder, 3 * STEPS, **moved))
    assert "sequence_length_tokens" in refused(
        pool, run_settings(folder, 4 * STEPS, **moved, on_change="continue", sequence_length_tokens=20)
    )


def test_a_file_that_was_only_touched_is_no_change(pool, folder):
    pool.run(train_and_listen, 4, run_settings(folder))
    for path in (folder / "text").iterdir():
        os.utime(path, (1, 1))
    pool.run(train_and_listen, 4, run_settings(folder, 2 * STEPS))


@pytest.mark.long
def test_a_run_of_an_earlier_version_has_no_record_and_gets_one(pool, folder):
    pool.run(train_and_listen, 4, run_settings(folder))
    (folder / "run" / "data.json").unlink()
    pool.run(train_and_listen, 4, run_settings(folder, 2 * STEPS))
    assert json.loads((folder / "run" / "data.json").read_text())["documents"] == 6


@pytest.mark.parametrize("record", ["{", *long("[]", '{"sha256": 1}', "null")])
def test_a_damaged_record_is_refused(pool, folder, record):
    pool.run(train_and_listen, 4, run_settings(folder))
    (folder / "run" / "data.json").write_text(record)
    assert "data.json: is not the record of a text" in refused(pool, run_settings(folder, 2 * STEPS))


HOLD = """
import sys, time
from pathlib import Path
from ringspan.train.run_folder.lock import RunLock
with RunLock(Path(sys.argv[1])) as lock:
    lock.take()
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(folder):
    """Another process that trains in the folder of the run."""
    (folder / "run").mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_trainer_is_refused_while_the_first_lives(pool, folder, holder):
    message = refused(pool, run_settings(folder))
    assert f"is being trained by process {holder.pid} on " in message
    assert not (folder / "run" / "run.json").exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    pool.run(train_and_listen, 4, run_settings(folder))


def test_the_command_refuses_it_too(monkeypatch, capsys, workplace):  # noqa: F811
    (workplace / "run").mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLD, workplace / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        assert "is being trained by" in refusal(monkeypatch, capsys, "train", workplace / "config.toml")
    finally:
        process.kill()
        process.communicate()


def test_a_lock_is_given_back_and_taken_again(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path) as lock:
            lock.take()
            lock.take()
    with RunLock(tmp_path / "not made yet") as lock:
        lock.take()
    assert not (tmp_path / "not made yet").exists()


def test_a_wrong_path_is_not_hidden_by_a_run_that_is_there(monkeypatch, capsys, workplace, pool, folder):  # noqa: F811
    pool.run(train_and_listen, 4, run_settings(folder))
    wrong = run_settings(folder, paths=str(folder / "txet"))
    assert "txet" in refused(pool, wrong) and "does not exist" in refused(pool, wrong)
    (workplace / "run").mkdir()
    (workplace / "run" / "run.json").write_text("{")
    line = refusal(monkeypatch, capsys, "train", workplace / "config.toml", "data.paths=txet")
    assert "txet" in line and "does not exist" in line


@pytest.mark.parametrize("every", [*long(0), 2])
def test_a_model_that_cannot_be_written_leaves_its_weights_in_a_checkpoint(pool, folder, every):
    config = run_settings(folder, every=every)
    message = refused(pool, config, 1000, error=CheckpointError)
    for part in ("was not written", "bytes are needed, 1,000 are free", "the same command writes the model"):
        assert part in message
    assert not (folder / "run" / "model").exists()
    pool.run(train_and_listen, 4, config)
    assert (folder / "run" / "model" / "config.json").exists()
    assert [step for step, name in curve(folder / "run") if name == "loss"] == list(range(1, STEPS + 1))
    assert "is finished" in refused(pool, config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("done", "then"), [*long((0, "starts from the beginning")), (STEPS, f"goes on from step {STEPS}")]
)
def test_where_no_checkpoint_fits_either_it_says_what_the_same_command_does(pool, folder, done, then):
    if done:
        pool.run(train_and_listen, 4, run_settings(folder, done))
    for outcome in pool.outcomes(train_on_a_full_disk, 4, run_settings(folder, done + STEPS)):
        message = str(outcome)
        assert isinstance(outcome, CheckpointError) and message.endswith(f"; then the same command {then}"), message
        assert message.count("1,000 are free; make room") == 2


@pytest.mark.long
def test_an_older_model_does_not_pass_for_the_last_one(pool, folder):
    pool.run(train_and_listen, 4, run_settings(folder))
    longer = run_settings(folder, 2 * STEPS)
    before = (folder / "run" / "model" / "model.safetensors").read_bytes()
    refused(pool, longer, 1000, error=CheckpointError)
    assert (folder / "run" / "model" / "model.safetensors").read_bytes() == before
    pool.run(train_and_listen, 4, longer)
    assert (folder / "run" / "model" / "model.safetensors").read_bytes() != before


def test_a_disk_that_is_too_small_is_said_at_the_start(monkeypatch, pool, folder):
    lines, *others = pool.run(on_a_small_disk, 4, run_settings(folder))
    assert any("1,000 bytes are free; a checkpoint takes about" in line for line in lines) and others == [[]] * 3


def on_a_small_disk(mesh, config):
    from ringspan.train import loop

    real = loop.shutil
    loop.shutil = types.SimpleNamespace(disk_usage=lambda path: types.SimpleNamespace(free=1000))
    try:
        return train_and_listen(mesh, config)
    finally:
        loop.shutil = real
