"""A folder whose model is Python files of its own: transformers' attention, and a feed-forward that it lacks."""

import json
from pathlib import Path
from typing import Final

_CONFIG: Final = """
from transformers import LlamaConfig


class GatedConfig(LlamaConfig):
    model_type = "gated_llama"
"""
_MODEL: Final = """
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from .configuration_gated import GatedConfig


class GatedMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * torch.sigmoid(x.float()).to(x.dtype)


class GatedForCausalLM(LlamaForCausalLM):
    config_class = GatedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = GatedMLP(config)
        self.post_init()
"""


def write_remote(folder: Path) -> Path:
    """Write a folder with a config and Python files, without weights."""
    folder.mkdir(exist_ok=True)
    values = {
        "model_type": "gated_llama",
        "auto_map": {
            "AutoConfig": "configuration_gated.GatedConfig",
            "AutoModelForCausalLM": "modeling_gated.GatedForCausalLM",
        },
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 1000,
    }
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "configuration_gated.py").write_text(_CONFIG)
    (folder / "modeling_gated.py").write_text(_MODEL)
    return folder
