"""The ranks of a mesh wait for each other as long as `init_process_group` was told."""

import pytest
import torch
import torch.distributed as dist

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
