"""Train on a Ray cluster: the workers of Ray Train are the ranks of the ring.

    pip install "ray[train]"
    python examples/ray_train.py examples/finetune.toml --workers 4 run=/shared/run steps=10

A worker group that fails is started again up to ``--max-failures`` times, and goes on from the run's newest valid
checkpoint. The folder of the run, the data and the environment must be the same on all nodes; relative paths are taken
from the current directory. Overrides are those of ``ringspan train``.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ringspan.cli.commands.train import train_rank
from ringspan.core.errors import RingspanError
from ringspan.train.config.load import load_config, parse_config


def worker(job: dict[str, Any]) -> None:
    """One rank of the run, in the process group that Ray Train has made."""
    os.chdir(job["folder"])
    train_rank(parse_config(job["config"]))


def main() -> None:
    """Start the workers and wait for the run."""
    parser = argparse.ArgumentParser(description="Train on a Ray cluster.")
    parser.add_argument("config", type=Path, help="TOML file of the run")
    parser.add_argument("overrides", nargs="*", help="settings as key=value")
    parser.add_argument("--workers", type=int, required=True, help="ranks")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each")
    parser.add_argument(
        "--max-failures", type=int, default=0, help="times to start them again"
    )
    given = parser.parse_intermixed_args()
    try:
        config = load_config(given.config, given.overrides)
        config.resolve_mesh(given.workers)
    except RingspanError as error:  # what every worker would refuse
        parser.error(str(error))

    TorchTrainer(
        worker,
        train_loop_config={"config": config.model_dump(), "folder": str(Path.cwd())},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpus),
        run_config=RunConfig(
            name="ray",
            storage_path=str(Path(config.run).resolve()),
            failure_config=FailureConfig(max_failures=given.max_failures),
        ),
    ).fit()
    print(f"metrics  {config.run}/metrics.jsonl\nmodel    {config.run}/model")


if __name__ == "__main__":
    main()
