"""What is tried of each argument of a trainer: for every field of its configuration a value with which it must be the
trainer on one process, or why there is none.
"""

import itertools
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import TrainingArguments
from trl import (  # pyright: ignore[reportPrivateImportUsage]
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
)
from trl.experimental.orpo import ORPOConfig

from tests.hf.preferences import dpo, kto, orpo, reward
from tests.hf.rollouts import grpo, rloo
from tests.hf.trainers import plain, sft

CONFIGS: Final = {
    plain: TrainingArguments, sft: SFTConfig, dpo: DPOConfig, kto: KTOConfig, orpo: ORPOConfig, reward: RewardConfig,
    grpo: GRPOConfig, rloo: RLOOConfig,
}  # fmt: skip

Options = dict[str, Any]


def of_everything(found: Any) -> dict[str, float]:
    """Numbers of an evaluation that know each logit's place, and of inputs and losses where these were asked for."""
    logits = found.predictions
    numbers = {
        "places": float(
            (logits * np.cos(np.arange(logits.size).reshape(logits.shape))).mean()
        )
    }
    for name in ("inputs", "losses"):
        if getattr(found, name) is not None:
            numbers[name] = float(np.mean(getattr(found, name)))
    return numbers


def of_batches(found: Any) -> dict[str, float]:
    return {
        f"batch_{n}": float(np.cos(logits).mean())
        for n, logits in enumerate(found.predictions)
    }


class BatchByBatch:
    """Numbers that add up over an evaluation's batches."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def __call__(self, found: Any, compute_result: bool) -> dict[str, float]:
        self.sums.append(float(torch.as_tensor(found.predictions).cos().mean()))
        if not compute_result:
            return {}
        result, self.sums = {"sum": sum(self.sums)}, []
        return result


# Each line is one run.
TRIED: Final[dict[Any, list[Options]]] = {
    plain: [
        {"accelerator_config": {"split_batches": True}},
        {"accelerator_config": {"use_seedable_sampler": False, "non_blocking": True}},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-2, "weight_decay": 0.3, "data_seed": 3, "seed": 9},
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3},
        {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 2, "full_determinism": True},
        {"include_num_input_tokens_seen": "non_padding", "label_names": ["labels"], "torch_empty_cache_steps": 1},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}, "warmup_steps": 1},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
        {"logging_strategy": "steps", "logging_first_step": True, "logging_steps": 2, "debug": "underflow_overflow"},
        {"max_steps": -1, "num_train_epochs": 0.3, "optim": "adamw_torch_fused", "remove_unused_columns": False},
        {"train_sampling_strategy": "sequential", "skip_memory_metrics": False, "use_cache": True},
        {"batch_eval_metrics": True, "compute_metrics": BatchByBatch()},
        {"eval_accumulation_steps": 1, "include_for_metrics": ["inputs", "loss"], "compute_metrics": of_everything},
        {"eval_do_concat_batches": False, "compute_metrics": of_batches},
        {"prediction_loss_only": True, "compute_metrics": of_everything},
        {"save_strategy": "steps", "save_steps": 2, "save_only_model": True},
        {"train_sampling_strategy": "group_by_length", "length_column_name": "length"},
        {"optim_args": "a=b", "optim_target_modules": "all-linear"},  # which no optimizer of these reads
    ],
    sft: [
        {"dataset_text_field": "text", "shuffle_dataset": True, "pad_token": "w4", "eos_token": "w3"},
        {"packing": True, "eval_packing": False, "packing_strategy": "bfd_split"},
        {"eval_packing": True, "truncation_mode": "keep_end", "max_length": 9},
        {"packing": True, "pad_to_multiple_of": 8},
        {"train_sampling_strategy": "group_by_length", "length_column_name": "length"},
        {"loss_type": "dft", "dataset_kwargs": {"skip_prepare_dataset": False}, "dataset_num_proc": 2},
    ],
    dpo: [
        *({"loss_type": [name]} for name in (
            "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "sft",
            "sigmoid_norm",
        )),
        *({"loss_type": [name], "label_smoothing": 0.1} for name in ("sigmoid", "exo_pair", "robust")),
        {"f_divergence_type": "js_divergence"},
        # Of exponentials: at 1e-2 weights are 1.01e-5 apart, by the rounding of TRL's log-probabilities in float32.
        {"f_divergence_type": "forward_kl", "learning_rate": 3e-3},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
        {"loss_type": ["discopop"], "discopop_tau": 0.2},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3], "beta": 0.5, "disable_dropout": False},
        {"padding_free": True},
        {"max_length": 8, "truncation_mode": "keep_end", "pad_to_multiple_of": 7, "use_weighting": True},
        {"ld_alpha": 0.3, "precompute_ref_batch_size": 3, "dataset_num_proc": 2, "pad_token": "w4"},
    ],
    kto: [
        {"loss_type": "apo_zero_unpaired", "disable_dropout": False},
        {"desirable_weight": 0.5, "undesirable_weight": 2.0, "beta": 0.5, "max_length": 8, "pad_to_multiple_of": 7},
        {"precompute_ref_batch_size": 3, "dataset_num_proc": 2},
    ],
    orpo: [
        {"max_completion_length": 4, "beta": 0.5, "disable_dropout": False, "padding_value": 3},
        {"max_length": 20, "is_encoder_decoder": False, "dataset_num_proc": 2},
    ],
    reward: [
        {"pad_to_multiple_of": 7, "disable_dropout": False, "dataset_num_proc": 2, "pad_token": "w4"},
        {"center_rewards_coefficient": 0.1, "max_length": 11, "eos_token": "w3"},
    ],
    grpo: [
        *({"beta": 0.0, "loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")),
        {"beta": 0.0, "loss_type": "sapo", "sapo_temperature_neg": 2.0, "sapo_temperature_pos": 1.5},
        {
            **{"beta": 0.0, "loss_type": "vespo", "vespo_k_neg": 2.0, "vespo_k_pos": 1.5},
            **{"vespo_lambda_neg": 1.5, "vespo_lambda_pos": 2.0, "num_iterations": 2},
        },
        {"beta": 0.0, "loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
        {"beta": 0.0, "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
        {"beta": 0.0, "delta": 1.5, "epsilon": 0.01, "epsilon_high": 0.02, "num_iterations": 2},
        {"lora": True, "beta": 0.1, "use_bias_correction_kl": True, "num_iterations": 2},
        {"beta": 0.0, "mask_truncated_completions": True, "reward_weights": [0.3, 2.0], "scale_rewards": "none"},
        {"beta": 0.0, "off_policy_mask_threshold": 0.01, "num_iterations": 2, "scale_rewards": "batch"},
        {"beta": 0.0, "multi_objective_aggregation": "normalize_then_sum", "shuffle_dataset": False},
        {"beta": 0.0, "entropy_coef": 0.05, "top_entropy_quantile": 0.3, "steps_per_generation": 4},
        {
            **{"beta": 0.0, "use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_coef_delta": 0.01},
            **{"entropy_coef_min": 0.01, "entropy_coef_max": 0.06, "entropy_target": 100.0},
        },
        {"beta": 0.0, "log_completions": True, "log_unique_prompts": True, "num_completions_to_print": 1},
        {"beta": 0.0, "num_generations_eval": 1, "pad_to_multiple_of": 7, "disable_dropout": True},
        {"beta": 0.0, "sampled": True, "top_k": 5, "repetition_penalty": 1.5, "temperature": 2.0},
        {"beta": 0.0, "sampled": True, "top_p": 0.5, "min_p": 0.2, "generation_kwargs": {"min_new_tokens": 5}},
    ],
    rloo: [
        {"beta": 0.0, "normalize_advantages": True, "reward_weights": [0.3, 2.0], "pad_to_multiple_of": 7},
        {"lora": True, "reward_clip_range": (0.2, 0.4), "mask_truncated_completions": True},
        {"beta": 0.0, "num_iterations": 2, "epsilon": 0.01, "epsilon_high": 0.02, "steps_per_generation": 4},
        {"beta": 0.0, "top_k": 5, "repetition_penalty": 1.5, "temperature": 2.0, "num_generations_eval": 1},
        {"beta": 0.0, "top_p": 0.5, "min_p": 0.2, "generation_kwargs": {"min_new_tokens": 5}, "disable_dropout": True},
        {"beta": 0.0, "log_completions": True, "log_unique_prompts": True, "num_completions_to_print": 1},
        {"beta": 0.0, "shuffle_dataset": False},
    ],
}  # fmt: skip

NOT_TRIED: Final[dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("not_tried.toml").read_text()
)


def named(make: Any) -> set[str]:
    """The arguments of a trainer that have a place in the tables."""
    tried = (name for of in (plain, make) for options in TRIED[of] for name in options)
    return {*tried, *itertools.chain(*NOT_TRIED.values())}


def of(make: Any) -> set[str]:
    """The arguments that a trainer of the installed release has."""
    return {field.name for field in fields(CONFIGS[make])}
