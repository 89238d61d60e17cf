"""A run keeps what it began with: its tokenizer, its text, its folder for itself, and its weights when all is full."""

import json
import os
import shutil
import types

import pytest
from transformers import AutoTokenizer

from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.torch.model.weights import writing
from ringspan.train.config.data_table import DataConfig
from ringspan.train.loop import Observer, train
from ringspan.train.run_folder.record import RunLock
from ringspan.train.run_folder.resume import compare
from tests.cases import long
from tests.cli.test_bad_input import refusal, workplace  # noqa: F401  workplace is a fixture
from tests.train.runs import curve, settings

STEPS = 2


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "origin"
    (folder / "text").mkdir(parents=True)
    for number in range(6):
        write(
            folder,
            number,
            f"chapter {number} says what the others say, and then it says it again\n"
            * 40,
        )
    return folder


def write(folder, number, text):
    (folder / "text" / f"{number}.txt").write_text(text)


def run_settings(folder, steps=STEPS, every=2, **data):
    common = {
        "paths": str(folder / "text"),
        "sequence_length_tokens": 40,
        "eval_fraction": 0.0,
    }
    return settings(
        folder,
        "run",
        steps=steps,
        data=common | data,
        evaluation={},
        checkpoints={"every_steps": every},
    )


def train_and_listen(mesh, config, free_bytes=None, of=(writing,)):
    """Train, on a disk with so much room for the model; what was said on this rank."""
    lines, real = [], shutil
    if free_bytes is not None:
        disk = types.SimpleNamespace(free=free_bytes)
        for module in of:
            module.shutil = types.SimpleNamespace(
                **vars(shutil) | {"disk_usage": lambda path: disk}
            )
    try:
        train(config, Observer(noticed=lines.append))
    finally:
        for module in of:
            module.shutil = real
    return lines


def train_on_a_full_disk(mesh, config):
    from ringspan.checkpoints import checkpoint

    return train_and_listen(mesh, config, 1000, of=(writing, checkpoint))


def refused(pool, *args, error=ConfigError):
    """The one message with which all ranks refuse."""
    outcomes = pool.outcomes(train_and_listen, 4, *args)
    assert all(isinstance(outcome, error) for outcome in outcomes), outcomes
    [message] = {str(outcome) for outcome in outcomes}
    return message


def vocabulary(folder):
    return AutoTokenizer.from_pretrained(folder).get_vocab()


def test_a_changed_text_is_named_and_needs_a_flag(pool, folder):
    pool.run(train_and_listen, 4, run_settings(folder))
    began, first = vocabulary(folder / "run" / "tokenizer"), curve(folder / "run")
    write(folder, 1, "zyxwv utsrq " * 300)
    write(folder, 9, "something new " * 100)
    (folder / "text" / "3.txt").unlink()
    message = refused(pool, run_settings(folder, 2 * STEPS))
    for part in (
        "another text",
        "1.txt is changed",
        "9.txt is new",
        "3.txt is gone",
        "data.on_change=continue",
    ):
        assert part in message
    assert curve(folder / "run") == first
    (folder / "text").rename(folder / "moved")
    moved = {"paths": str(folder / "moved")}
    lines, *_ = pool.run(
        train_and_listen,
        4,
        run_settings(folder, 2 * STEPS, **moved, on_change="continue"),
    )
    assert any("continuing with another text" in line for line in lines)
    assert (
        vocabulary(folder / "run" / "tokenizer")
        == vocabulary(folder / "run" / "model")
        == began
    )
    losses = [
        value for (_, name), value in curve(folder / "run").items() if name == "loss"
    ]
    assert len(losses) == 2 * STEPS
    # the new text is the run's now
    lines, *_ = pool.run(train_and_listen, 4, run_settings(folder, 3 * STEPS, **moved))
    assert not any("another text" in line for line in lines)


def test_a_text_is_that_of_the_run_by_its_tokens(tmp_path):
    def text(digest, stamp):
        stream = types.SimpleNamespace(digest=lambda: digest)
        return types.SimpleNamespace(
            stream=stream, num_documents=6, num_tokens=9, files={"a.txt": (1, stamp)}
        )

    asked = DataConfig(paths=("a.txt",), sequence_length_tokens=40)
    # begun by a version that kept no record
    assert compare(tmp_path, asked, text("a", 1)) is None
    assert json.loads((tmp_path / "data.json").read_text())["documents"] == 6
    assert compare(tmp_path, asked, text("a", 2)) is None  # only touched
    with pytest.raises(ConfigError, match=r"a\.txt is changed"):
        compare(tmp_path, asked, text("b", 2))
    for record in ("{", "[]", '{"sha256": 1}', "null"):
        (tmp_path / "data.json").write_text(record)
        with pytest.raises(
            ConfigError, match=r"data\.json: is not the record of a text"
        ):
            compare(tmp_path, asked, text("a", 1))


def test_a_second_trainer_is_refused_while_the_first_lives(pool, folder):
    (folder / "run").mkdir()
    with RunLock(folder / "run") as lock:
        lock.take()
        assert f"is being trained by process {os.getpid()} on " in refused(
            pool, run_settings(folder)
        )
        assert not (folder / "run" / "run.json").exists()


def test_a_lock_is_given_back_and_taken_again(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path) as lock:
            lock.take()
            lock.take()
    with RunLock(tmp_path / "not made yet") as lock:
        lock.take()
    assert not (tmp_path / "not made yet").exists()


def test_a_wrong_path_is_not_hidden_by_a_run_that_is_there(
    monkeypatch,
    capsys,
    workplace,  # noqa: F811
    pool,
    folder,
):
    for place in (folder, workplace):
        (place / "run").mkdir()
        (place / "run" / "run.json").write_text("{")
    message = refused(pool, run_settings(folder, paths=str(folder / "txet")))
    assert "txet" in message and "does not exist" in message
    line = refusal(
        monkeypatch, capsys, "train", workplace / "config.toml", "data.paths=txet"
    )
    assert "txet" in line and "does not exist" in line


@pytest.mark.parametrize("every", [*long(0), 1])
def test_a_model_that_cannot_be_written_is_in_a_checkpoint(pool, folder, every):
    weights = folder / "run" / "model" / "model.safetensors"
    pool.run(train_and_listen, 4, run_settings(folder, 1, every))
    older, config = weights.read_bytes(), run_settings(folder, STEPS, every)
    message = refused(pool, config, 1000, error=CheckpointError)
    for part in (
        "was not written",
        "bytes are needed, 1,000 are free",
        "the same command writes the model",
    ):
        assert part in message
    assert weights.read_bytes() == older
    pool.run(train_and_listen, 4, config)
    assert weights.read_bytes() != older
    assert [step for step, name in curve(folder / "run") if name == "loss"] == list(
        range(1, STEPS + 1)
    )
    assert "is finished" in refused(pool, config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("done", "then"),
    [*long((0, "starts from the beginning")), (STEPS, f"goes on from step {STEPS}")],
)
def test_if_no_checkpoint_fits_the_remedy_is_named(pool, folder, done, then):
    if done:
        pool.run(train_and_listen, 4, run_settings(folder, done))
    for outcome in pool.outcomes(
        train_on_a_full_disk, 4, run_settings(folder, done + STEPS)
    ):
        message = str(outcome)
        assert isinstance(outcome, CheckpointError) and message.endswith(
            f"; then the same command {then}"
        ), message
        assert message.count("1,000 are free; make room") == 2


def test_a_disk_that_is_too_small_is_said_at_the_start(pool, folder):
    lines, *others = pool.run(on_a_small_disk, 4, run_settings(folder))
    assert (
        any("1,000 bytes are free; a checkpoint takes about" in line for line in lines)
        and others == [[]] * 3
    )


def on_a_small_disk(mesh, config):
    from ringspan.train import loop

    return train_and_listen(mesh, config, 1000, of=(loop,))
