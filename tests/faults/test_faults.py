"""A bounded part of the faults; ``make faults`` runs all of them, many times."""

import pytest

from tests.faults import faults


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


def check(row: faults.Row, *, exit_code: int = 0) -> None:
    assert row.passed == row.tries > 0, row.failures
    assert row.figures.get("losses_bit_equal", True)
    assert row.figures.get("exit_code", exit_code) == exit_code


def test_a_killed_rank_is_named_and_the_run_comes_back_bit_for_bit(folder):
    row = faults.kill(folder, 1)
    assert row.figures["losses_bit_equal"] and row.figures["exit_code"] == 0
    # Times are those of a machine that is left alone; make faults holds them against their promise.
    assert "named ['ringspan: rank" in "".join(row.failures) or row.passed == 1, row.failures


def test_a_stopped_rank_is_named(folder):
    row = faults.stop(folder, 1)
    assert row.figures["losses_bit_equal"] and row.figures["exit_code"] == 0


def test_signals_save_and_end_with_their_exit_code(folder):
    row = faults.terminate(folder, 2)
    check(row)
    assert row.figures["exit_code_at_last"] == 0


def test_a_kill_in_a_save_leaves_the_old_or_the_new_checkpoint(folder):
    check(faults.kill_in_save(folder, 6))
