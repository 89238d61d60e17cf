"""Experts that all tokens of a rank may leave out (zero experts) have the gradients of one process, or none."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import ringspan as rs
from tests.cases import long
from tests.every_model.hybrids import hybrid_config
from tests.torch.models import check, step, tokens

ADAPTER = {
    "target_modules": ["o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def model_with_zero_experts(num_chosen: int, *, is_adapted: bool):
    """In each layer, so many of the tokens of ``step`` go to an expert; all others go to zero experts."""
    torch.manual_seed(0)
    # transformers 5.17 has a number of layers beside that of hidden layers.
    sizes = {
        "zero_expert_num": 4,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "num_layers": 2,
    }
    # with less, gradients of routers cancel
    config = hybrid_config("longcat_flash", **sizes, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).float()
    # so that the first layer's input has no gradient
    model.get_input_embeddings().requires_grad_(False)
    model = (
        get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **ADAPTER))
        if is_adapted
        else model
    )

    def bias(router, args):
        scores = router.classifier(args[0].flatten(0, -2).float()).softmax(-1)
        ahead = (
            (scores[:, :2].amax(-1) - scores[:, 2:].topk(2).values[:, 1])
            .sort(descending=True)
            .values
        )
        router.e_score_correction_bias[:2] = (
            -ahead[num_chosen - 1 : num_chosen + 1].mean() if num_chosen else -9.0
        )

    routers = (
        module
        for module in model.modules()
        if hasattr(module, "e_score_correction_bias")
    )
    hooks = [router.register_forward_pre_hook(bias) for router in routers]
    with torch.no_grad():
        model(input_ids=tokens(1, 37))
    for hook in hooks:
        hook.remove()
    return model


def trained(mesh, num_chosen, options, is_adapted):
    model = rs.parallelize(
        model_with_zero_experts(num_chosen, is_adapted=is_adapted), mesh, **options
    )
    inner = model.get_base_model() if is_adapted else model
    # as accelerate does while it accumulates
    inner.set_requires_gradient_sync(options["checkpoint"] == "full")
    step(model, mesh)
    inner.set_requires_gradient_sync(True)
    return step(model, mesh)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "none", "feedforward_chunk_tokens": 5},
        *long({"checkpoint": "full"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_adapted", [False, *long(True)], ids=["plain", "LoRA"])
@pytest.mark.parametrize("num_chosen", [1, 0], ids=["on one rank", "on no rank"])
def test_experts_at_rest_are_trained_as_on_one_process(
    pool, num_chosen, options, is_adapted
):
    alone = model_with_zero_experts(num_chosen, is_adapted=is_adapted)
    expected = [step(alone) for _ in range(2)][1]
    is_awake = any(
        "layers.1.mlp.experts" in name and g is not None
        for name, g in expected[1].items()
    )
    assert is_awake == (num_chosen > 0)
    check(pool.run(trained, 2, num_chosen, options, is_adapted), expected)
