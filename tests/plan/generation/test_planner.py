"""Which mesh generates, and when one device does better."""

from dataclasses import replace

from ringspan.plan.cluster.hardware import device
from ringspan.plan.generation.cost import text_cost
from ringspan.plan.generation.planner import TextQuestion, plan_text
from ringspan.plan.model.configs import model_shape


def question(
    model="llama-3.1-8b",
    kind="h100",
    devices=8,
    prompt=131_072,
    new_tokens=200,
    batch=1,
):
    return TextQuestion(
        shape=model_shape(model),
        device=device(kind),
        devices=devices,
        prompt=prompt,
        new_tokens=new_tokens,
        batch=batch,
    )


def said(answer):
    return " ".join(answer.reasons())


def test_nothing_is_faster_by_three_percent():
    asked = question()
    answer = plan_text(asked)
    assert answer.fits and answer.alone_fits and not answer.alone_is_better
    assert answer.cost.peak_bytes == sum(answer.as_json()["bytes"].values())
    for text in asked.texts:
        if asked.fits(text) and text.weights == "whole":
            assert (
                0.97 * answer.cost.seconds
                <= text_cost(asked.shape, text, asked.device).seconds
            )
    assert "would hold it too" in said(answer)


def test_one_device_is_better_where_links_are_slow():
    """PCIe cards: a short prompt of a small model is written sooner without sending anything."""
    answer = plan_text(question("qwen3-0.6b", "rtx-4090", 2, prompt=2000))
    assert answer.alone_is_better and answer.text.devices == 1
    assert "one NVIDIA RTX 4090 24 GB would be the better choice" in said(answer)
    assert answer.as_json()["one_device_is_better"] is True
    long = plan_text(question("qwen3-0.6b", "rtx-4090", 2, prompt=131_072))
    assert not long.alone_is_better and long.text.ring * long.text.tp == 2


def test_a_prompt_that_one_device_cannot_hold_goes_on_a_ring():
    answer = plan_text(question(prompt=2_000_000))
    assert answer.fits and not answer.alone_fits and answer.text.ring > 1
    assert "does not hold it: 16.1 GB of weights, 262 GB of cache" in said(answer)


def test_weights_that_do_not_fit_are_gathered_for_every_token():
    """GPT has no tensor parallelism: 350 GB in bfloat16 on a ring inside of a node."""
    answer = plan_text(question("gpt-175b", "h100", 16, prompt=1000))
    assert answer.fits and answer.text.ring == 8 and answer.text.weights == "sharded"
    assert "gathered for every token" in said(answer)
    assert "2,048 learned positions" in said(
        plan_text(question("gpt-175b", "h100", 16, prompt=3000))
    )


def test_generate_refuses_more_tokens_than_positions():
    assert not plan_text(question(prompt=131_072 - 200)).is_refused
    answer = plan_text(question(prompt=131_072 - 199))
    assert (
        answer.fits and answer.is_refused and answer.as_json()["positions"] == 131_072
    )
    assert (
        "made for 131,072 positions: ringspan generate refuses 131,073 tokens"
        in answer.as_json()["reasons"][0]
    )
    unknown = replace(
        question(prompt=10**6), shape=replace(model_shape("llama-3.1-8b"), made_for=0)
    )
    assert not plan_text(unknown).is_refused and plan_text(unknown).positions is None


def test_what_fits_nowhere_is_said_with_the_longest_that_does():
    asked = question("llama-3.1-70b", "h100", 8, prompt=10_000_000)
    answer = plan_text(asked)
    assert not answer.fits and 0 < answer.max_prompt < 10_000_000
    assert plan_text(replace(asked, prompt=answer.max_prompt)).fits
    assert not plan_text(replace(asked, prompt=int(1.01 * answer.max_prompt))).fits
    assert plan_text(question("llama-3.1-405b", "h100", 1)).max_prompt == 0


def test_prompts_are_shared_by_replicas():
    answer = plan_text(question(devices=8, batch=8, prompt=4096, new_tokens=2000))
    text = answer.text
    assert text.replicate * text.batch == 8
    assert answer.fits


def test_one_device_of_one_is_not_called_better_than_others():
    answer = plan_text(question(devices=1))
    assert "holds weights and cache; there is nothing to send" in said(answer)
