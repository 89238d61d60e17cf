"""Jobs of clusters are started as their platforms would start them, with two ranks on loopback."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from examples.grpo import tiny
from tests.examples.platforms import ROOT, environment, put_programs

CLUSTER = ROOT / "examples" / "cluster"
STUBS = {
    # A step of a job runs here, whichever nodes it is for.
    "srun": 'while [[ "$1" == --* ]]; do case "$1" in *=*) shift;; *) shift 2;; esac; done; exec "$@"',
    "scontrol": "printf '127.0.0.1\\nlocalhost\\n'",
    "vllm": f'echo "$@" > asked; exec {sys.executable} -m tests.hf.fake_vllm "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model, and with the programs of a platform in bin."""
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    put_programs(tmp_path, STUBS)
    return tmp_path


def check_trained(place: Path, out: str) -> None:
    """A step was trained with completions of the server, and nothing is left behind."""
    assert "reward " in out
    assert AutoModelForCausalLM.from_pretrained(place / "out").num_parameters() > 0
    assert sorted(path.name for path in place.iterdir()) == [
        "asked",
        "bin",
        "model",
        "out",
    ]


def free_ports() -> int:
    """The first of two neighbouring ports that nobody has, an even one."""
    for port in range(20000, 40000, 2):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise OSError("no free ports")


@pytest.mark.long
def test_a_slurm_job_of_a_server_and_a_trainer(place):
    port = free_ports()
    done = subprocess.run(
        [
            *("bash", str(CLUSTER / "grpo_slurm.sh"), str(ROOT / "examples/grpo.py")),
            *(str(place / "model"), str(place), "--output", str(place / "out")),
            *("--steps", "1"),
        ],
        env=environment(
            place,
            {
                "SLURM_JOB_ID": str((port - 20000) // 2 + 30000),
                "SLURM_JOB_NODELIST": "gpu[1-2]",
                "SLURM_GPUS_ON_NODE": "2",
            },
        ),
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    asked = (place / "asked").read_text().split()
    assert asked[:4] == ["serve", str(place / "model"), "--port", str(port)]
    assert asked[4:6] == ["--tensor-parallel-size", "2"]
    check_trained(place, done.stdout)


@pytest.mark.parametrize("name", ["slurm", "grpo_slurm"])
def test_a_slurm_script_is_valid(name):
    script = CLUSTER / f"{name}.sh"
    text = script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode and f"usage: sbatch {name}.sh " in done.stderr
    options = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    body = text.index("set -euo pipefail")
    # Slurm stops reading options at the first command.
    assert options and all(text.index(line) < body for line in options)


def groups(name: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each group of a JobSet: its name, its job, and its container."""
    found = yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
    )
    for group in found["spec"]["replicatedJobs"]:
        job = group["template"]["spec"]
        pod = job["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        # Pods of a group are named NAME-GROUP-0-0.NAME.
        host = f"{found['metadata']['name']}-{group['name']}-0-0.{found['metadata']['name']}"
        yield host, job, container


@pytest.mark.parametrize("name", ["jobset", "grpo_jobset"])
def test_a_jobset_has_as_many_pods_as_torchrun_waits_for(name):
    (host, job, container) = list(groups(name))[-1]
    command = container["command"]
    assert f"--nnodes={job['completions']}" in command
    assert job["parallelism"] == job["completions"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in command
    port = container["ports"][0]["containerPort"]
    assert f"--rdzv-endpoint={host}:{port}" in command


@pytest.mark.long
def test_a_jobset_of_a_server_and_a_trainer(place):
    (host, _, server), (head, _, trainer) = groups("grpo_jobset")
    port = free_ports()
    changed = {
        "Qwen/Qwen3-0.6B": str(place / "model"),
        f"{host}:8000": f"127.0.0.1:{port}",
        "--port=8000": f"--port={port}",
        f"{head}:29500": f"localhost:{port + 1}",
        "--nnodes=2": "--nnodes=1",
        "--nproc-per-node=8": "--nproc-per-node=2",
        "/shared": str(place),
        "/grpo": "/out",
        "examples/out.py": str(ROOT / "examples/grpo.py"),
    }

    def here(container: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        words = container["command"]
        for old, new in changed.items():
            words = [word.replace(old, new) for word in words]
        named = {each["name"]: each["value"] for each in container.get("env", [])}
        return words, environment(place, named)

    command, variables = here(server)
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    serving = subprocess.Popen(command, env=variables, cwd=place)
    try:
        command, variables = here(trainer)
        done = subprocess.run(
            [*command, "--steps", "1"],
            env=variables,
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
    finally:
        serving.kill()
        serving.wait()
    assert done.returncode == 0, done.stderr[-3000:]
    check_trained(place, done.stdout)
