"""A run of a training file with folds, and with heads over two processes."""

import pytest

from tests.train.test_loop import alone, losses, settings, text, train_on  # noqa: F401 - two are fixtures


def test_a_run_in_folds_has_the_losses_of_one_pass(pool, text, alone):  # noqa: F811
    steps = {"warmup_steps": 1, "learning_rate": 1e-2, "accumulation_steps": 2, "batch_size": 2}
    pool.run(train_on, 4, settings(text, "folds", mesh={"tp": 2}, memory={"folds": 3}, optimizer=steps))
    assert losses(text / "folds") == pytest.approx(losses(alone), rel=2e-6)
