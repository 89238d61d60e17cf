"""A folder's tokenizer: whose it is, and whether its chat template is one."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ringspan.core.errors import ConfigError
from ringspan.generate.folder import load_config, load_tokenizer
from ringspan.generate.settings import GenerateSettings
from ringspan.train.config.load import parse_config
from ringspan.train.model import load_model_config, load_processor
from tests.torch.models import build
from tests.train.data.test_messages import PLAIN, tokenizer


def config_of(folder):
    return load_config(GenerateSettings(folder=str(folder)))


@pytest.fixture
def base(tmp_path):
    build("llama", vocab_size=128).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_an_adapter_without_a_tokenizer_takes_its_bases(base, tmp_path):
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(
        adapter := tmp_path / "adapter"
    )
    with pytest.raises(
        ConfigError, match=r"adapter: has no tokenizer .tokenizer.json.; save it there"
    ):
        load_tokenizer(str(adapter), config_of(adapter))
    tokenizer(PLAIN).save_pretrained(base)
    assert load_tokenizer(str(adapter), config_of(adapter)).chat_template == PLAIN


def test_a_broken_chat_template_is_blamed_itself(base):
    tokenizer("\n{% for m in messages %}[{{ m.content }]{% endfor %}").save_pretrained(
        base
    )
    says = r"base.?: its chat template has an error in line 2: .*; correct chat_template.jinja"
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(str(base), config_of(base), chats=True)
    # a prompt without a chat does not need it
    load_tokenizer(str(base), config_of(base))
    data = {"paths": "x", "messages": "messages", "sequence_length_tokens": 8}
    config = parse_config({"model": {"path": str(base)}, "data": data})
    with pytest.raises(ConfigError, match=says):
        load_processor(config.model, load_model_config(config))
