"""The ranks of a mesh wait for each other as long as `init_process_group` was told."""

import pytest
import torch
import torch.distributed as dist

from ringspan.torch.runtime import timeout
from ringspan.torch.runtime.timeout import timeout_seconds
from tests.pool import TIMEOUT_SECONDS


def seconds(mesh):
    """Of the world, and of each axis; of the weights' ranks too where these are split by two axes."""
    groups = [*mesh.get_all_groups(), *([mesh["ring_tp"].get_group()] if "tp" in mesh.mesh_dim_names else [])]
    return [timeout_seconds(group, torch.device("cpu")) for group in (dist.group.WORLD, *groups)]


@pytest.mark.parametrize(("replicate", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_groups_of_a_mesh_have_the_time_out_of_the_world(pool, replicate, tp):
    for found in pool.run(seconds, 4, replicate=replicate, tp=tp):
        assert len(found) == (3 if tp == 1 else 5) and set(found) == {0.6 * TIMEOUT_SECONDS}


def without_options(mesh):
    """The ring's time-out after a change that a back end does not allow."""
    device, group = torch.device("cpu"), mesh["ring"].get_group()
    before = timeout_seconds(group, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeout, "timeout_seconds", lambda *_: group._get_backend(torch.device("meta")))
        timeout.take_timeout(mesh)
    return timeout_seconds(group, device) == before


def test_a_back_end_that_has_no_time_out_is_left_alone(pool):
    assert pool.run(without_options, 2) == [True, True]
