"""transformers' ``generate`` on a ring against one process: the same tokens, and the same logits to 1e-5."""

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import DynamicCache, GenerationConfig

import ringspan as rs
from ringspan.torch.generate.weights import gathered_bytes
from ringspan.torch.model.layers.modules import local_part
from ringspan.torch.model.memory.sharding import gathered_parameters, kept_whole
from tests.cases import few, long
from tests.cli.commands.test_generate import byte_tokenizer
from tests.pool import Pool
from tests.torch.generate import models

LIMIT = 1e-5
LENGTHS = (1, 33, 131)
TWICE = models.prompt(40).repeat(1, 2)
GAP = torch.cat((torch.ones(1, 20), torch.zeros(1, 9), torch.ones(1, 21)), 1).long()


def padded_batch() -> dict[str, torch.Tensor]:
    """Three prompts of different lengths, padded on the left as transformers' tokenizers do."""
    ids = models.prompt(45, batch=3)
    mask = torch.ones_like(ids)
    mask[0, :11] = mask[2, :3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def fresh_cache(model: Any) -> Any:
    """What keeps keys and values over two calls: the ring's own, or transformers'."""
    return {"past_key_values": model.new_cache()} if hasattr(model, "new_cache") else {}


def two_turns(model: Any, first: int = 40, second: int = 37) -> Any:
    """A second question after the answer to the first."""
    kept = model.generate(
        models.prompt(first),
        max_new_tokens=5,
        return_dict_in_generate=True,
        **fresh_cache(model),
    )
    more = torch.cat((kept.sequences, models.prompt(second)), 1)
    return plain(model, more, max_new_tokens=6, past_key_values=kept.past_key_values)


def plain(model: Any, input_ids: torch.Tensor, **options: Any) -> Any:
    options = {
        "max_new_tokens": 6,
        "output_logits": True,
        "return_dict_in_generate": True,
    } | options
    return model.generate(input_ids, **options)


def sampled(model: Any) -> Any:
    torch.manual_seed(5)
    return plain(
        model,
        models.prompt(41),
        do_sample=True,
        top_p=0.9,
        temperature=0.8,
        num_return_sequences=2,
    )


def stop_strings(model: Any) -> Any:
    """Up to what the fifth new token says, where that comes first."""
    tokenizer = byte_tokenizer()
    word = tokenizer.decode(model.generate(models.prompt(40), max_new_tokens=5)[0, -1:])
    return plain(
        model,
        models.prompt(40),
        max_new_tokens=30,
        stop_strings=[word],
        tokenizer=tokenizer,
    )


def from_a_copy(model: Any) -> Any:
    """A prompt that is read once, and a copy of its cache for a question."""
    kept = fresh_cache(model) or {"past_key_values": DynamicCache(config=model.config)}
    model.generate(models.prompt(40), max_new_tokens=1, **kept)
    question = torch.cat((models.prompt(40), models.prompt(7)), 1)
    plain(
        model,
        torch.cat((models.prompt(40), models.prompt(9)), 1),
        **copy.deepcopy(kept),
    )
    return plain(model, question, **copy.deepcopy(kept))


WAYS = {
    "stop strings": stop_strings,
    "copies of a cache": from_a_copy,
    "returned beams": lambda model: plain(
        model, **padded_batch(), num_beams=3, num_return_sequences=2
    ),
    "sampling": sampled,
    "beams": lambda model: plain(model, models.prompt(41), num_beams=3),
    "left padding": lambda model: plain(model, **padded_batch()),
    "padding in the middle": lambda model: plain(
        model, models.prompt(50), attention_mask=GAP
    ),
    "two turns": two_turns,
    "a short second turn": lambda model: two_turns(model, 40, 3),
    "prompt lookup": lambda model: plain(
        model, TWICE, prompt_lookup_num_tokens=4, max_new_tokens=8
    ),
    "prefill chunks": lambda model: plain(
        model, models.prompt(83), prefill_chunk_size=35
    ),
    "no cache": lambda model: plain(model, models.prompt(37), use_cache=False),
    "repetition penalty": lambda model: plain(
        model, models.prompt(41), repetition_penalty=1.3, no_repeat_ngram_size=2
    ),
    "guidance": lambda model: plain(model, models.prompt(41), guidance_scale=1.5),
    "two prompts": lambda model: plain(model, models.prompt(41, batch=2)),
}


# Each is a way above on another prompt, or draws other tokens from the same logits.
MORE_WAYS = [
    "sampling",
    "beams",
    "two turns",
    "repetition penalty",
    "guidance",
    "two prompts",
]
OWN_WAYS = [way for way in WAYS if way not in MORE_WAYS]


def configured_for_training(mesh: DeviceMesh | None) -> list[torch.Tensor]:
    """A model that keeps no cache in training: a generation config that says nothing of it, and a cache of the call."""
    model: Any = models.model("llama")
    if mesh is not None:
        rs.parallelize(model, mesh)
        model.generation_config.use_cache = False
    ids, said = models.prompt(40), GenerationConfig(max_new_tokens=6, do_sample=False)
    return [
        model.generate(ids, generation_config=said),
        model.generate(ids, max_new_tokens=6, **fresh_cache(model)),
    ]


def test_a_config_for_training_generates(pool):
    expected = configured_for_training(None)
    for found in pool.run(configured_for_training, 2):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def results(way: Any, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        out = way(model)
    return out.sequences, torch.stack(out.logits)


def greedy(length: int) -> Any:
    return lambda model: plain(model, models.prompt(length))


@cache
def expected(name: str, way: str | int) -> tuple[torch.Tensor, torch.Tensor]:
    return results(
        greedy(way) if isinstance(way, int) else WAYS[way], models.model(name)
    )


def on_ring(
    mesh: DeviceMesh, name: str, ways: list[Any], prefill_tokens: int, options: Any
) -> list[Any]:
    model: Any = rs.parallelize(models.model(name), mesh, **options)
    type(model).ring_prefill_tokens = prefill_tokens
    return [
        results(greedy(way) if isinstance(way, int) else WAYS[way], model)
        for way in ways
    ]


def check(
    pool: Pool,
    ranks: int,
    name: str,
    ways: list[Any],
    prefill_tokens: int = 4096,
    **mesh: Any,
) -> None:
    options = mesh.pop("options", {})
    for got in pool.run(on_ring, ranks, name, ways, prefill_tokens, options, **mesh):
        for way, (ids, logits) in zip(ways, got, strict=True):
            ids_expected, logits_expected = expected(name, way)
            assert torch.equal(ids, ids_expected), way
            error = (logits - logits_expected).norm() / logits_expected.norm()
            assert error < LIMIT, (way, float(error))


# What three ranks or four do is the same for all kinds: those with the most in a cache stand for them.
KINDS = [("deepseek_v3", 2)]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *KINDS,
        *long(
            ("gpt_oss", 3),
            ("llama4_text", 4),
            *((name, 2) for name in models.CONFIGS if (name, 2) not in KINDS),
        ),
    ],
)
def test_tokens_and_logits_are_those_of_one_process(pool, name, ranks):
    """The longest prompt is read in chunks whose size divides nothing."""
    check(pool, ranks, name, list(LENGTHS), prefill_tokens=23)


@pytest.mark.parametrize(
    ("ways", "ranks"),
    [
        (OWN_WAYS, 2),
        (["two turns"], 3),
        *long((MORE_WAYS, 2), (["beams", "two turns", "no cache"], 1)),
    ],
    ids=["all", "a second turn through sockets", "more", "one rank"],
)
def test_every_way_to_generate_is_that_of_one_process(pool, ways, ranks):
    """With windows, full attention, sinks and a mixture of experts in one model: what a cache has to know."""
    check(pool, ranks, "gpt_oss", ways)


@pytest.mark.parametrize("name", ["llama4_text", *long("gemma3_text", "deepseek_v3")])
def test_padding_and_turns_of_chunks_windows_and_latents(pool, name):
    check(
        pool,
        2,
        name,
        ["left padding", "two turns", "prompt lookup", "beams"],
        prefill_tokens=11,
    )


def test_with_split_heads(pool):
    check(pool, 4, "llama", ["sampling", "beams"], tp=2)


def whole_bytes(mesh: DeviceMesh) -> tuple[int, int]:
    """What gathering is said to take, and the bytes of what is gathered."""
    model: Any = rs.parallelize(models.model("llama"), mesh)
    said = gathered_bytes(model)
    with kept_whole(model), torch.no_grad():
        plain(model, models.prompt(5), weights="sharded", max_new_tokens=1)
        return said, sum(
            local_part(parameter).nbytes for parameter in gathered_parameters(model)
        )


@pytest.mark.parametrize(
    ("ranks", "mesh"), [(2, {}), (4, {"tp": 2}), (4, {"replicate": 2})]
)
def test_whole_weights_are_counted_as_the_copies_that_they_are(pool, ranks, mesh):
    each = pool.run(whole_bytes, ranks, **mesh)
    assert len({said for said, _ in each}) == 1, "all ranks decide alike"
    for said, found in each:
        assert said == found


def test_replicas_answer_prompts_of_their_own(pool):
    for rank, ids in enumerate(pool.run(own_prompt, 4, replicate=2)):
        length = (33, 131)[rank // 2]
        assert torch.equal(ids, expected("llama", length)[0])


def own_prompt(mesh: DeviceMesh) -> torch.Tensor:
    model: Any = rs.parallelize(models.model("llama"), mesh)
    return plain(
        model, models.prompt((33, 131)[mesh["replicate"].get_local_rank()])
    ).sequences


def train_and_generate(mesh: DeviceMesh | None, weights: str, generates: bool) -> Any:
    """Losses of two steps, with text in between, and the text at the end."""
    model: Any = models.model("llama").train()
    ids = models.prompt(37)
    batch = {"input_ids": ids, "labels": ids}
    extra = {}
    if mesh is not None:
        model, batch, extra = (
            rs.parallelize(model, mesh),
            rs.shard_batch(batch, mesh),
            {"weights": weights},
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        if generates:
            model.generate(ids, max_new_tokens=2, **extra)
        loss.backward()
        if generates:
            model.generate(ids, max_new_tokens=2, **extra)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.generate(ids, max_new_tokens=6, **extra)


@pytest.mark.parametrize("weights", [*long("whole"), "sharded"])
def test_training_goes_on_and_the_text_is_of_the_new_weights(pool, weights):
    losses, text = train_and_generate(None, weights, generates=False)
    for got, ids in pool.run(train_and_generate, 2, weights, True):
        assert got == pytest.approx(losses, rel=1e-5)
        assert torch.equal(ids, text)


def test_ranks_that_are_seeded_differently_draw_the_same(pool):
    texts = pool.run(seeded_apart, 3)
    assert all(torch.equal(text, texts[0][0]) for text, _ in texts)
    assert len({number for _, number in texts}) == 3, (
        "each goes on with its own numbers"
    )


def seeded_apart(mesh: DeviceMesh) -> Any:
    model: Any = rs.parallelize(models.model("llama"), mesh)
    torch.manual_seed(mesh.get_rank())
    return model.generate(models.prompt(33), max_new_tokens=12, do_sample=True), float(
        torch.rand(())
    )


OPTIONS = [
    ({"past_key_values": DynamicCache()}, r"model.new_cache\(\)"),
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "output_hidden_states",
    ),
    ({"assistant_early_exit": 2}, "assistant_early_exit=2 is not supported"),
    ({"input_ids": models.prompt(0)}, "at least one token"),
    ({"input_ids": models.prompt(33) + 97}, "outside of the vocabulary"),
    ({"inputs_embeds": torch.zeros(1, 3, 32), "input_ids": None}, "inputs_embeds"),
    ({"weights": "half"}, "whole, sharded"),
    ({"max_new_tokns": 2}, "max_new_tokns"),
    (
        {"attention_mask": torch.full((1, 33), 2)},
        "attention_mask has 2; it may have 1 for tokens",
    ),
]


def refused_with(mesh: DeviceMesh) -> None:
    model: Any = rs.parallelize(models.model("llama"), mesh)
    for options, says in OPTIONS:
        with pytest.raises(ValueError, match=says):
            model.generate(
                **{"input_ids": models.prompt(33), "max_new_tokens": 2} | options
            )
    read: Any = model.generate(
        models.prompt(33), max_new_tokens=4, return_dict_in_generate=True
    )
    with pytest.raises(
        rs.UnsupportedError,
        match=r"prompt_lookup_num_tokens .* over a cache that holds 36",
    ):
        model.generate(
            read.sequences,
            past_key_values=read.past_key_values,
            prompt_lookup_num_tokens=2,
        )


def test_an_option_that_cannot_be_honoured_raises_on_every_rank(pool):
    pool.run(refused_with, 2)


def refused(model: Any, mesh: DeviceMesh, case: str) -> None:
    rank, ids = mesh.get_rank(), models.prompt(33)
    match case:
        case "a cache and none":
            model.generate(ids, past_key_values=model.new_cache(), use_cache=False)
        case "different prompts":
            model.generate(models.prompt(33, seed=rank), max_new_tokens=2)
        case "different settings":
            model.generate(ids, max_new_tokens=2 + rank)
        case "one rank trains":
            if rank:
                model.generate(ids, max_new_tokens=2)
            else:
                model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh))
        case "gradients through a cache":
            model(ids, past_key_values=model.new_cache(), use_cache=True)
        case "a mask that is added to scores":
            with torch.no_grad():
                model(
                    ids,
                    past_key_values=model.new_cache(),
                    attention_mask=torch.zeros(1, 33) - torch.inf,
                )
        case _:
            cache = model.generate(
                ids, max_new_tokens=2, return_dict_in_generate=True
            ).past_key_values
            given = {
                "another text": {"input_ids": models.prompt(60)},
                "a text as long as the cache": {"input_ids": cache.ids},
                "a cache of another size": {"input_ids": models.prompt(60, batch=2)},
                "a mask of the cache alone": {
                    "input_ids": ids[:, :3],
                    "attention_mask": torch.ones_like(cache.ids),
                },
            }
            model.generate(**given[case], past_key_values=cache, max_new_tokens=2)


REFUSED = {
    "a cache and none": "leave one out",
    "different prompts": "different input",
    "different settings": "different max_new_tokens",
    "one rank trains": "different things",
    "gradients through a cache": "no_grad",
    "a mask that is added to scores": "attention_mask has -inf; it may have 1 for tokens",
    "another text": "differ from what the cache holds, from token 0 on",
    "a text as long as the cache": "at least one more",
    "a cache of another size": "holds 1 sequences",
    "a mask of the cache alone": "holds 34 tokens and attention_mask is for 34; give one for",
}


def refused_in_turn(mesh: DeviceMesh) -> None:
    model: Any = rs.parallelize(models.model("llama"), mesh)
    for case, says in REFUSED.items():
        with pytest.raises(ValueError, match=says):
            refused(model, mesh, case)


def test_unsupported_options_raise_everywhere_and_leave_no_trace(pool):
    pool.run(refused_in_turn, 2)


def stopped(mesh: DeviceMesh) -> int:
    model: Any = rs.parallelize(models.model("llama"), mesh)
    rank = mesh.get_rank()

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return ids.shape[1] >= 9 + 4 * rank

    return model.generate(
        models.prompt(5), max_new_tokens=30, stopping_criteria=[criterion]
    ).shape[1]


def test_the_first_rank_decides_when_to_stop(pool):
    assert pool.run(stopped, 3) == [9] * 3


def decided_alone(mesh: DeviceMesh, how: str) -> Any:
    """What the last rank does in a call of the user's, which catches what comes of it and generates again."""
    model: Any = rs.parallelize(models.model("llama"), mesh)
    is_odd = mesh.get_rank() == mesh.size() - 1

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        if is_odd and ids.shape[1] == 8:
            raise OSError("out of paper")
        return False

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if is_odd and how == "a processor that raises":
            raise OSError("out of paper")
        return (
            scores.roll(1)
            if is_odd and (how == "a processor that differs" or ids.shape[1] == 16)
            else scores
        )

    def end() -> None:
        if is_odd:
            raise OSError("out of paper")

    given: dict[str, Any] = {"logits_processor": [processor]}
    if how == "a criterion that raises":
        given = {"stopping_criteria": [criterion]}
    elif how == "a streamer that raises at the end":
        given = {"streamer": SimpleNamespace(put=lambda ids: None, end=end)}
    elif how == "a processor that others lack" and not is_odd:
        given = {"logits_processor": []}
    error = None
    try:
        model.generate(models.prompt(5), max_new_tokens=12, do_sample=False, **given)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, model.generate(
        models.prompt(5), max_new_tokens=4, do_sample=False
    ).shape[1]


OUT_OF_PAPER = (
    "a criterion that raises",
    "a processor that raises",
    "a streamer that raises at the end",
)
DIFFERS = "a processor that differs", "a processor whose last token differs"


@pytest.mark.parametrize(
    "how", few([*OUT_OF_PAPER, *DIFFERS, "a processor that others lack"], 2)
)
def test_what_a_users_code_does_on_one_rank_is_named_on_all(pool, how):
    *others, (own, _) = found = pool.run(decided_alone, 2, how)
    assert [length for _, length in found] == [9, 9]
    if "lack" in how:
        assert own.endswith(
            "given different logits_processor: rank 0: [], rank 1: ['function']"
        )
        return
    if how in DIFFERS:
        assert (
            "given different chosen tokens" in own
            and "a logits processor" in own
            and "sampler" not in own
        )
        return
    assert own == "OSError: out of paper"
    assert [error for error, _ in others] == [
        "PeerMismatch: rank 1 failed: OSError: out of paper"
    ]


def test_a_config_of_the_user_is_left_as_it_was(pool):
    assert pool.run(keeps_config, 2) == [0.5] * 2


def keeps_config(mesh: DeviceMesh) -> float:
    model: Any = rs.parallelize(models.model("llama"), mesh)
    config = GenerationConfig(max_time=0.5, max_new_tokens=500)
    model.generate(models.prompt(5), generation_config=config)
    return config.max_time
