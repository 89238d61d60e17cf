"""Launch files are read, and started as their platforms would: two nodes of one rank each, on loopback."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.examples.platforms import ROOT, environment, put_programs
from tests.train.runs import training_file, write_text

CLUSTER = ROOT / "examples" / "cluster"
STUBS = {
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    # Every host is this one.
    "ssh": 'while [[ "$1" == -* ]]; do shift; done; shift; exec bash -c "$*"',
}
# What is installed here already.
_SETUP = "uv pip install"


def trainjob() -> tuple[str, dict[str, str]]:
    """A pod's command, and what Kubeflow Trainer gives it: this node's rank is RANK, the first node's address HEAD."""
    job = yaml.safe_load((CLUSTER / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == (
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
    )
    trainer = job["spec"]["trainer"]
    given = {each["name"]: each["value"] for each in trainer["env"]}
    given |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1"}
    given |= {"PET_NODE_RANK": "RANK", "PET_MASTER_ADDR": "HEAD"}
    return shlex.join(trainer["command"]), given | {"PET_MASTER_PORT": "29500"}


def skypilot() -> tuple[str, dict[str, str]]:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task["resources"]["accelerators"] == "H100:8"
    return task["run"], {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": "RANK",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_IPS": "HEAD\nHEAD",
    }


def dstack() -> tuple[str, dict[str, str]]:
    task = yaml.safe_load((CLUSTER / "ringspan.dstack.yml").read_text())
    assert task["type"] == "task" and task["volumes"] == ["/shared:/runs"]
    commands = [each for each in task["commands"] if not each.startswith(_SETUP)]
    return "\n".join(commands), {
        "DSTACK_NODES_NUM": str(task["nodes"]),
        "DSTACK_NODE_RANK": "RANK",
        "DSTACK_GPUS_PER_NODE": "1",
        "DSTACK_MASTER_NODE_IP": "HEAD",
    }


PLATFORMS = {"trainjob": trainjob, "skypilot": skypilot, "dstack": dstack}


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_launch_file_starts_a_run_of_two_nodes(name):
    script, given = PLATFORMS[name]()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "-m ringspan train " in script and script.rstrip().endswith(
        "run=/runs/finetune"
    )
    shared = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert f"{shared}=1" in script or given[shared] == "1"
    assert "2" in given.values() and "RANK" in given.values()


def test_ssh_asks_for_hosts_and_gpus():
    for arguments in ([], ["one two"]):
        done = subprocess.run(
            ["bash", str(CLUSTER / "ssh.sh"), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode and "usage: ssh.sh " in done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a training file, what it reads, and the programs of a node in bin."""
    write_text(tmp_path, files=3)
    (tmp_path / "train.toml").write_text(training_file(tmp_path))
    put_programs(tmp_path, STUBS)
    return tmp_path


def node(place: Path, given: dict[str, str]) -> dict[str, str]:
    """The environment of a node, without what says that this process is one already."""
    return environment(place, given, without=("RANK", "PET_"))


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def check_trained(place: Path, ended: list[subprocess.Popen[str]]) -> None:
    """Both nodes ended well, after a step of both, which left a model."""
    said = [process.communicate(timeout=240)[0] for process in ended]
    assert [process.returncode for process in ended] == [0] * len(ended), said
    assert '{"step": 1, "loss": ' in (place / "run" / "metrics.jsonl").read_text()
    assert (place / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.parametrize("name", PLATFORMS)
def test_two_nodes_of_a_platform_meet_and_train(name, place):
    script, given = PLATFORMS[name]()
    port = free_port()
    for config in ("/runs/finetune.toml", "examples/finetune.toml"):
        script = script.replace(config, str(place / "train.toml"))
    script = script.replace("29500", port)
    script = script.replace("run=/runs/finetune", f"run={place / 'run'}")
    nodes = list[subprocess.Popen[str]]()
    for rank in range(2):
        own = {
            key: value.replace("RANK", str(rank))
            .replace("HEAD", "127.0.0.1")
            .replace("29500", port)
            for key, value in given.items()
        }
        nodes.append(
            subprocess.Popen(
                ["bash", "-euc", script],
                env=node(place, own),
                cwd=place,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    check_trained(place, nodes)


@pytest.mark.long
def test_two_nodes_by_ssh_meet_and_train(place):
    script = place / "ssh.sh"
    script.write_text((CLUSTER / "ssh.sh").read_text().replace("29500", free_port()))
    config = str(place / "train.toml")
    process = subprocess.Popen(
        ["bash", str(script), "localhost 127.0.0.1", "1", config],
        env=node(place, {}),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    check_trained(place, [process])
