"""Trainers on tiny models and made-up data, on a ring and on one process."""

import random
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from ringspan.hf import RingConfig, RingTrainerMixin
from ringspan.torch.model.saving import whole_weights
from tests.every_model.hybrids import HYBRIDS, INDEXED
from tests.torch.engine.recurrence.models import build as build_stateful
from tests.torch.models import build

VOCABULARY = 97
COMMON = {
    "max_steps": 10, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "max_grad_norm": 0.5,
    "adam_epsilon": 1e-3,  # at 1e-8 Adam makes whole steps of gradients that are rounding
}  # fmt: skip
# Arguments of a trainer itself.
OWN = (
    *(
        "callbacks",
        "compute_loss_func",
        "compute_metrics",
        "data_collator",
        "eval_dataset",
        "train_dataset",
    ),
    "preprocess_logits_for_metrics",
)

# What trainers log: numbers that are compared one by one, and those near 0, compared with the largest of them.
LOGGED = (
    "loss",
    "grad_norm",
    "eval_loss",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
    "eval_entropy",
)
SCORES = (
    *(
        f"{name}/{side}"
        for name in ("rewards", "logps")
        for side in ("chosen", "rejected", "margins")
    ),
    *("rewards/accuracies", "eval_rewards/margins", "kl", "nll_loss", "log_odds_ratio"),
    *("min_reward", "mean_reward", "max_reward", "accuracy", "eval_accuracy"),
    *(
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "completions/mean_length",
        "eval_reward",
    ),
)

datasets.disable_progress_bars()


class Ring(RingTrainerMixin, Trainer):
    """A user's own line."""


class RingSFT(RingTrainerMixin, SFTTrainer):
    """Another one."""


class Examples(Dataset[dict[str, Tensor]]):
    """Examples of one length, of which some have targets at their beginning alone, so that other ranks have none."""

    def __init__(self, count: int, length: int = 23, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index].clone()
        if index % 3 == 1:
            labels[4:] = -100
        return {
            "input_ids": self.ids[index],
            "labels": labels,
            "attention_mask": torch.ones_like(labels),
        }


def conversations(count: int, seed: int, column: str | None) -> datasets.Dataset:
    """Documents of 3 to 20 tokens, with a column that masks some of them or none."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [draw.randrange(2, VOCABULARY) for _ in range(draw.randrange(3, 21))]
        row: dict[str, list[int]] = {"input_ids": ids}
        if column is not None:
            row[column] = [int(place >= len(ids) // 2) for place in range(len(ids))]
        rows.append(row)
    return datasets.Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each entry of the vocabulary; made anew, since trainers change theirs."""
    words = Tokenizer(
        WordLevel(
            {f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"
        )
    )
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1"
    )


def made(model: str) -> Any:
    """A kind of model; behind a plus sign, with the auxiliary loss of its router; behind an at sign, in 4 bits with an
    adapter, which TRL does not know: it would cast adapters to bfloat16, whose rounding depends on the order of sums.
    """
    kind, _, bits = model.partition("@")
    kind, _, router = kind.partition("+")
    if bits:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=bits, bnb_4bit_use_double_quant=True
        )
        plain = build(kind)
        given = {
            "config": plain.config,
            "state_dict": plain.state_dict(),
            "dtype": torch.float32,
        }
        # whose kernel for bfloat16 fails in evaluation at these sizes
        model = type(plain).from_pretrained(None, quantization_config=config, **given)
        for module in model.modules():
            module.support_avx512bf16_for_cpu = False
        lora: Any = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
        )
        model.is_loaded_in_4bit = model.is_quantized = False
        return lora
    if kind in HYBRIDS | INDEXED:
        # So many heads have no equal scores, of which one process takes any (``docs/chosen-keys.md``).
        return build_stateful(
            kind, torch.float32, **({"index_n_heads": 32} if kind in INDEXED else {})
        )
    return build(kind, **({"output_router_logits": True} if router else {}))


def packed(folder: str) -> Any:
    """The model of a folder, as transformers opens it with weights in 8 bits."""
    # two seconds that no other test needs
    from torchao.quantization import (
        Int8WeightOnlyConfig,
    )

    config = TorchAoConfig(Int8WeightOnlyConfig())
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )


def arguments(folder: str, kind: type = TrainingArguments, **options: Any) -> Any:
    """What both have: ten steps of two accumulated batches."""
    return kind(output_dir=folder, **COMMON | options)


def plain(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    torch.manual_seed(0)
    options = dict(options)
    own = {name: options.pop(name) for name in OWN if name in options}
    given = {"model": made(model), "args": arguments(folder, **options)}
    given |= {"train_dataset": Examples(40), "eval_dataset": Examples(12, seed=1)} | own
    return (
        Trainer(**given)
        if ring is None
        else Ring(**given, ring=RingConfig(mesh=mesh, **ring))
    )


def sft(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    torch.manual_seed(0)
    # Without the last rows: of those that do not come out even, replicas would see some twice.
    options = {"bf16": False, "max_length": 24, "dataloader_drop_last": True} | options
    column, lora = options.pop("column", None), options.pop("lora", False)
    weights = options.pop("packed", None)
    of = made(model) if weights is None else packed(weights)
    given = {
        "model": of,
        "args": arguments(folder, SFTConfig, **options),
        "processing_class": tokenizer(),
    }
    given |= {
        "train_dataset": conversations(200, 0, column),
        "eval_dataset": conversations(36, 1, column),
    }
    if lora:
        given["peft_config"] = LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules="all-linear"
        )
    return (
        SFTTrainer(**given)
        if ring is None
        else RingSFT(**given, ring=RingConfig(mesh=mesh, **ring))
    )


def history(trainer: Any) -> dict[str, Any]:
    """What a trainer has logged, step by step, and its weights."""
    logs = trainer.state.log_history
    state = (
        whole_weights(trainer.model)
        if isinstance(trainer, RingTrainerMixin)
        else trainer.model.state_dict()
    )
    found: dict[str, Any] = {
        name: [one[name] for one in logs if name in one] for name in (*LOGGED, *SCORES)
    }
    return found | {"weights": {name: tensor.clone() for name, tensor in state.items()}}


def train(
    mesh: Any, make: Callable[..., Any], model: str, ring: dict[str, Any] | None, options: dict[str, Any],
    seen: Callable[[Any], Any] = history,
) -> Any:  # fmt: skip
    """What is ``seen`` of a trainer after ten steps and an evaluation; on one process where ``ring`` is None."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(mesh, model, ring, folder, options)
        trainer.train()
        trainer.evaluate()
        return seen(trainer)


SHORT = ("max_steps", 3)
TOLERANCE = 1e-5  # relative


@lru_cache
def short_run(
    make: Any, model: str, replicas: int, *options: tuple[str, Any]
) -> dict[str, Any]:
    """Three steps and an evaluation on one process, of as many examples as so many replicas take."""
    sizes = dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size"), 2 * replicas
    )
    return train(None, make, model, None, dict([SHORT, *options]) | sizes)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """By what is logged, and of the weights: the largest relative difference."""
    result: dict[str, float] = {}
    for name, values in expected.items():
        if name != "weights" and values:
            assert len(found[name]) == len(values), name
            scale = scale_of(name, expected)
            pairs = zip(found[name], values, strict=True)
            result[name] = max(
                abs(a - b) / (scale or abs(b) or max(map(abs, values)) or 1.0)
                for a, b in pairs
            )
    if found["weights"]:  # of the first rank
        result["weights"] = max(
            float((found["weights"][name] - value).abs().max() / value.abs().max())
            for name, value in expected["weights"].items()
            if name in found["weights"]
        )
    return result


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Hold what is logged, and the weights, to those of one process."""
    apart = differences(found, expected)
    assert expected["loss"] and expected["eval_loss"]
    assert not {name: value for name, value in apart.items() if not value < TOLERANCE}


def check(
    world: Callable[[int], Any], ranks: int, make: Callable[..., Any], model: str, options: dict[str, Any],
    expected: dict[str, Any], ring: dict[str, Any] | None = None, **sizes: int,
) -> None:  # fmt: skip
    """Hold a trainer on so many ranks to one process."""
    for found in world(ranks).run(
        train, ranks, make, model, ring or {}, options, **sizes
    ):
        close(found, expected)


def scale_of(name: str, expected: dict[str, Any]) -> float | None:
    """What the differences of a number are relative to, where that is not the number itself: it may be a small
    difference of large ones.
    """
    of = {"kl": "entropy"}.get(name, name)
    if "rewards/" in name and expected.get("logps/chosen"):
        # differences of these, times beta
        return 0.1 * max(map(abs, expected["logps/chosen"]))
    if name in ("loss", "eval_loss") and expected.get("reward_std"):
        # a sum of advantages
        return max(map(abs, (*expected[name], *expected["reward_std"])))
    return max(map(abs, expected.get(of) or expected[name])) if name in SCORES else None


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))
