"""Models that come as Python files of their own."""

from transformers import PreTrainedConfig


def has_own_code(config: PreTrainedConfig) -> bool:
    """Return whether a config comes with Python files that make its model; it was read with leave to run them."""
    return "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
