"""A bounded part of the faults; ``make faults`` runs all of them, many times, and holds their times to the promises."""

import pytest

from tests.faults import faults
from tests.faults.hosts import why_not

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


def test_a_killed_rank_is_named_and_the_run_comes_back_bit_for_bit(folder):
    row = faults.kill(folder, 1)
    assert row.figures["named"] == row.tries == 1, row.failures
    assert row.figures["losses_bit_equal"] and row.figures["exit_code"] == 0


def test_a_stopped_rank_is_named_and_the_run_comes_back_bit_for_bit(folder):
    row = faults.stop(folder, 1)
    assert row.figures["named"] == row.tries == 1, row.failures
    assert row.figures["losses_bit_equal"] and row.figures["exit_code"] == 0


def test_a_signal_to_the_launcher_saves_and_ends_with_its_exit_code(folder):
    row = faults.terminate(folder, 1)
    assert row.passed == row.tries == 1, row.failures
    assert row.figures["losses_bit_equal"] and row.figures["exit_code_at_last"] == 0


def test_a_kill_in_a_save_leaves_the_old_or_the_new_checkpoint(folder):
    row = faults.kill_in_save(folder, 6)
    assert row.passed == row.tries == 6, row.failures


@pytest.mark.timeout(300)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_hosts_name_each_other_when_their_link_is_cut_and_go_on_when_it_is_back(folder):
    row = faults.cut_link(folder, 1)
    assert row.tries == 1 and row.figures["exit_codes"] == [0, 0], row.failures
    assert row.figures["losses_bit_equal"]
