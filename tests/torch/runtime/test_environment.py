"""Whether this process is a rank, as its environment says: all of it, or a refusal."""

import pytest

from ringspan.core.errors import ConfigError
from ringspan.torch.runtime.environment import is_rank
from ringspan.torch.runtime.mesh import init_mesh

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "LOCAL_RANK": "1",
}


def describe(monkeypatch, **changes):
    for name, value in {**RANK, **changes}.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(
            name, raising=False
        )


def test_torchrun_describes_a_rank_and_no_environment_none(monkeypatch):
    describe(monkeypatch)
    assert is_rank()
    describe(monkeypatch, RANK=None, WORLD_SIZE=None)
    assert not is_rank()  # an address alone is nobody's


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"RANK": None},
            "WORLD_SIZE is set in the environment, and RANK not: start with torchrun",
        ),
        ({"WORLD_SIZE": None}, "RANK is set in the environment, and WORLD_SIZE not"),
        ({"MASTER_PORT": None, "MASTER_ADDR": ""}, "and MASTER_ADDR, MASTER_PORT not"),
        (
            {"RANK": "one"},
            "RANK = 'one' in the environment: should be a number from 0 to 1",
        ),
        (
            {"RANK": "2"},
            "RANK = '2' in the environment: should be a number from 0 to 1",
        ),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
        ({"MASTER_PORT": "70000"}, "should be a number from 0 to 65535"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK = '-1'"),
    ],
)
def test_half_of_a_rank_raises(monkeypatch, changes, message):
    describe(monkeypatch, **changes)
    for ask in (is_rank, init_mesh):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert message in str(caught.value)
