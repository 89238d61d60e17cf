"""``[adapter]``: the matrices of one process, however the work is split; folders that PEFT and the command open."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringspan.checkpoints.state import model_facts
from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.core.messages.lines import first_change
from ringspan.generate.folder import load_config, load_model
from ringspan.generate.settings import GenerateSettings
from ringspan.torch.model.weights.loading import read_whole
from ringspan.train.adapter import add_adapter
from ringspan.train.config.tables import TrainConfig
from ringspan.train.loop import train
from ringspan.train.model import build_model, load_model_config
from ringspan.train.run_folder.export import export_merged
from tests.cases import long
from tests.torch.models import build, relative, tokens
from tests.train import runs
from tests.train.runs import losses, train_on


@pytest.fixture(scope="module")
def base(text):
    """The folder of a model that somebody trained, with its tokenizer."""
    from ringspan.train.config.data_table import DataConfig
    from ringspan.train.data.documents import scan_documents
    from ringspan.train.data.tokens import train_tokenizer

    folder = text / "base"
    build(
        "llama", vocab_size=300, hidden_size=32, intermediate_size=64
    ).save_pretrained(folder)
    train_tokenizer(
        scan_documents(
            DataConfig(paths=(str(text / "text"),), sequence_length_tokens=45)
        ).documents,
        300,
    ).save_pretrained(folder)
    return folder


def test_what_peft_asks_of_transformers_warns_nobody(base, tmp_path):
    folder = str(tmp_path / "adapter")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        config = settings(base, "quiet", {"rank": 2})
        add_adapter(
            AutoModelForCausalLM.from_pretrained(base), config.adapter, str(base)
        ).save_pretrained(folder)
        load_model(
            asked := GenerateSettings(folder=folder, max_new_tokens=1),
            load_config(asked),
        )
    assert [
        str(one.message)
        for one in found
        if "gradient_checkpointing" in str(one.message)
    ] == []


def settings(
    base: Path, name: str, adapter: dict[str, Any], **changes: Any
) -> TrainConfig:
    own = {
        "model": {"path": str(base)},
        "adapter": adapter,
        "optimizer": {"batch_size": 2},
    }
    return runs.settings(base.parent, name, **own | changes)


def one_process(config: TrainConfig) -> tuple[list[float], Any]:
    """The same steps without a ring, on PEFT's model."""
    from ringspan.train.data.sequences import build_data
    from ringspan.train.model import load_tokenizer

    model_config = load_model_config(config)
    plain = build_model(config.model, model_config)
    read_whole(plain)
    model = add_adapter(plain, config.adapter, config.model.path).train()
    data = build_data(config, load_tokenizer(config.model, model_config))
    return runs.plain_steps(config, model, data.train), model


KINDS = [
    ("lora", {"rank": 4}, {"mesh": {"replicate": 2}}),
    (
        "dora",
        {
            "rank": 3,
            "alpha": 5.0,
            "use_dora": True,
            "target_modules": ["q_proj", "down_proj"],
        },
        {"mesh": {"replicate": 2}},
    ),
    (
        "rslora over 2 x tp 2",
        {"rank": 4, "use_rslora": True},
        {"mesh": {"tp": 2}, "optimizer": {"batch_size": 4}},
    ),
]


@pytest.mark.parametrize(
    ("name", "adapter", "changes"), [*long(*KINDS[:2]), *KINDS[2:]]
)
def test_an_adapter_trains_as_on_one_process(pool, base, name, adapter, changes):
    config = settings(base, name, adapter, **changes)
    expected, model = one_process(config)
    [result, *_] = pool.run(train_on, 4, config)
    lines = [
        json.loads(line)
        for line in (base.parent / name / "metrics.jsonl").read_text().splitlines()
    ]
    training = [line["loss"] for line in lines if "loss" in line]
    assert training == pytest.approx(expected, rel=1e-5)
    assert result.facts["trained_parameters"] == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    folder = base.parent / name / "model"
    assert not (folder / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(base)
    opened = PeftModel.from_pretrained(plain, folder)
    ids = tokens(1, 23)
    with torch.no_grad():
        assert relative(opened(ids).logits, model(ids).logits) < 1e-4
        assert (
            relative(
                model(ids).logits,
                AutoModelForCausalLM.from_pretrained(base)(ids).logits,
            )
            > 1e-3
        ), "it learns"
    AutoTokenizer.from_pretrained(folder)
    found_model = opened_by_the_command(folder)
    with torch.no_grad():
        assert relative(found_model(ids).logits, model(ids).logits) < 1e-4


def test_an_adapter_is_not_opened_over_other_weights(pool, base, tmp_path):
    """Neither those of a model of equal shapes, nor any but the ones that it was trained over; these in any files."""
    config = settings(base, "over", {"rank": 2}, mesh={"replicate": 2}, steps=1)
    pool.run(train_on, 4, config)
    folder = base.parent / "over" / "model"
    moved = AutoModelForCausalLM.from_pretrained(base)
    moved.save_pretrained(tmp_path / "moved", max_shard_size="20KB")
    build(
        "llama", vocab_size=300, hidden_size=32, intermediate_size=64, seed=7
    ).save_pretrained(tmp_path / "other")
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text())
    for name in ("moved", "other"):
        path.write_text(
            json.dumps(values | {"base_model_name_or_path": str(tmp_path / name)})
        )
        if name == "moved":
            assert opened_by_the_command(folder).config.vocab_size == 300
            continue
        for opens in (
            opened_by_the_command,
            lambda folder: export_merged(folder, tmp_path / "merged"),
        ):
            with pytest.raises(
                ConfigError,
                match=r"was trained over other weights than those in .*other .then .*base",
            ):
                opens(folder)
        assert not (tmp_path / "merged").exists()
    path.write_text(json.dumps(values))


def opened_by_the_command(folder: Path) -> Any:
    asked = GenerateSettings(folder=str(folder))
    return load_model(asked, load_config(asked))


@pytest.mark.long
def test_a_run_resumes_on_another_mesh_and_is_merged(pool, base):
    """From a checkpoint that holds the adapter alone; with other weights it does not resume."""
    adapter, name = {"rank": 4, "merge": True}, "resumed"
    whole = settings(base, "whole", adapter, mesh={"replicate": 2}, steps=4)
    pool.run(train_on, 4, whole)
    changes = {"checkpoints": {"every_steps": 2}, "watchdog": {"enabled": False}}
    pool.run(
        stop_after_two,
        4,
        settings(base, name, adapter, mesh={"replicate": 2}, steps=4, **changes),
    )
    [checkpoint] = (base.parent / name / "checkpoints").glob("step_*")
    size = sum(file.stat().st_size for file in checkpoint.rglob("*"))
    assert size < (base / "model.safetensors").stat().st_size
    again = settings(base, name, adapter, steps=4, optimizer={"batch_size": 4})
    weights = load_file(base / "model.safetensors")
    build(
        "llama", vocab_size=300, hidden_size=32, intermediate_size=64, seed=7
    ).save_pretrained(base)
    for outcome in pool.outcomes(train_on, 4, again):
        assert isinstance(
            outcome, CheckpointError
        ) and "was trained with other weights" in str(outcome)
    from safetensors.torch import save_file

    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    pool.run(train_on, 4, again)
    assert losses(base.parent / name)[-1] == pytest.approx(
        losses(base.parent / "whole")[-1], rel=1e-5
    )
    one, other = (
        AutoModelForCausalLM.from_pretrained(base.parent / run / "model")
        for run in (name, "whole")
    )
    assert not (base.parent / name / "model" / "adapter_config.json").exists()
    for weight, same in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight, same, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("adapter", "change", "says"),
    [
        (
            {},
            {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
            "with rope_parameters.rope_theta =",
        ),
        *long(
            (
                {"rank": 4},
                {"rms_norm_eps": 1.0},
                "with rms_norm_eps = 1e-06 in the model's config.json, where it is 1.0",
            )
        ),
    ],
)
def test_a_run_resumes_with_the_config_that_it_began_with(
    pool, text, base, adapter, change, says
):
    folder = Path(shutil.copytree(base, text / f"base, {len(adapter)}"))
    changes = {
        "evaluation": {"every_steps": 0},
        "data": {"paths": str(text / "text"), "sequence_length_tokens": 45},
    }
    config = settings(
        folder, f"other config, {len(adapter)}", adapter, steps=1, **changes
    )
    pool.run(train_on, 4, config)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for outcome in pool.outcomes(train_on, 4, config.model_copy(update={"steps": 2})):
        assert (
            isinstance(outcome, ConfigError)
            and says in str(outcome)
            and "set it back" in str(outcome)
        ), outcome


def test_what_decides_no_number_is_not_compared():
    """Who wrote a config and where; a field that another release of transformers has, and this one has not."""
    model = build("llama", vocab_size=300)
    before = model_facts(model)
    model.config.architectures, model.config._name_or_path, model.config.dtype = (
        ["Other"],
        "elsewhere",
        "bfloat16",
    )
    model.generation_config.output_attentions = None  # as good as the False that it was
    assert first_change(before, model_facts(model)) is None
    model.generation_config.temperature = 0.5
    assert "temperature = null in the model's generation_config.json" in first_change(
        before, model_facts(model)
    )
    newer = {
        **before,
        "config.json": {**before["config.json"], "novel": 1},
        "transformers": "9",
    }
    assert first_change(before, newer) is None
    assert first_change(before, {**newer, "transformers": before["transformers"]})


@pytest.mark.long
@pytest.mark.parametrize(("name", "adapter", "changes"), KINDS)
def test_a_merged_model_is_what_peft_merges_of_one_process(
    pool, base, name, adapter, changes
):
    config = settings(base, f"{name}, merged", adapter | {"merge": True}, **changes)
    _, model = one_process(config)
    pool.run(train_on, 4, config)
    folder = base.parent / f"{name}, merged" / "model"
    index = json.loads((base / "config.json").read_text())
    found, expected = (
        load_file(folder / "model.safetensors"),
        model.merge_and_unload(safe_merge=True).state_dict(),
    )
    assert (
        found.keys() == load_file(base / "model.safetensors").keys()
        and index["model_type"] == "llama"
    )
    for key, weight in found.items():
        assert relative(weight, expected[key]) < 1e-4, key
    assert (
        relative(
            found["model.layers.0.mlp.down_proj.weight"],
            load_file(base / "model.safetensors")[
                "model.layers.0.mlp.down_proj.weight"
            ],
        )
        > 1e-3
    ), "it learns"


TIED = [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]]


@pytest.fixture(scope="module")
def tied_base(base):
    """The folder of a model whose head and embedding share a weight."""
    folder = base.parent / "tied base"
    shutil.copytree(base, folder)
    build(
        "llama",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        tie_word_embeddings=True,
        seed=3,
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [*({"target_modules": each} for each in TIED), {"modules_to_save": ["lm_head"]}],
)
@pytest.mark.parametrize("kind", ["llama", *long("gemma3"), "gpt2"])
def test_an_adapter_of_tied_layers_opens_as_it_was_trained(kind, options, tmp_path):
    plain = build(kind, tie_word_embeddings=True)
    plain.save_pretrained(tmp_path / "base")
    names = {"embed_tokens": "wte", "q_proj": "c_attn"} if kind == "gpt2" else {}
    targets = [
        names.get(each, each) for each in options.get("target_modules", ["q_proj"])
    ]
    chosen: dict[str, Any] = options | {"target_modules": targets}
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(task_type="CAUSAL_LM", r=4, **chosen),
    )
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    ids = tokens(1, 19)
    export_merged(tmp_path / "adapter", tmp_path / "merged")
    opened = opened_by_the_command(tmp_path / "adapter")
    exported, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert relative(plain.eval()(input_ids=ids).logits, expected) > 1e-2, (
            "it changes something"
        )
        assert relative(opened(input_ids=ids).logits, expected) < 1e-5
        assert relative(exported.eval()(input_ids=ids).logits, expected) < 1e-5


def test_weights_stay_tied_where_the_adapter_leaves_them_equal(tied_base, tmp_path):
    """Beside an adapter of other layers, and under tokens that train in embedding and head alike."""
    choices: list[dict[str, Any]] = [{}, {"trainable_token_indices": [3, 5]}]
    for number, options in enumerate(choices):
        folder = tmp_path / str(number)
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **options)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tied_base), lora)
        model.save_pretrained(folder)
        opened = opened_by_the_command(folder)
        assert (
            opened.lm_head.weight is opened.model.embed_tokens.weight
            and opened.config.tie_word_embeddings
        )


@pytest.mark.parametrize(
    "targets", ["all-linear", *long(["lm_head", "embed_tokens", "q_proj"])]
)
def test_a_run_merges_tied_layers_as_it_trained_them(pool, tied_base, targets):
    name = f"tied, {len(targets)}"
    adapter = {"rank": 4, "merge": True, "target_modules": targets}
    config = settings(
        tied_base,
        name,
        adapter,
        mesh={"replicate": 2},
        optimizer={"batch_size": 2, "learning_rate": 0.05},
    )
    _, model = one_process(config)
    pool.run(train_on, 4, config)
    found = AutoModelForCausalLM.from_pretrained(tied_base.parent / name / "model")
    assert found.config.tie_word_embeddings == (targets == "all-linear")
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == (
        targets == "all-linear"
    )
    with torch.no_grad():
        assert (
            relative(
                found.eval()(tokens(1, 19)).logits, model.eval()(tokens(1, 19)).logits
            )
            < 1e-4
        )


def stop_after_two(mesh: Any, config: TrainConfig) -> None:
    """A run that ends after its checkpoint of step 2, as if it had been killed."""

    class Killed(Exception):
        pass

    from ringspan.train.loop import Observer, _Run

    one_step = _Run._one_step

    def two_steps(run: Any) -> bool:
        if run._step == 2:
            run._notice(run._checkpoints.wait())
            raise Killed
        return one_step(run)

    _Run._one_step = two_steps
    try:
        with pytest.raises(Killed):
            train(config, Observer())
    finally:
        _Run._one_step = one_step


@pytest.mark.parametrize(
    ("adapter", "changes", "message"),
    [
        (
            {"rank": 4, "dropout": 0.1},
            {},
            "adapter.dropout = 0.1: each rank would draw for its own tokens",
        ),
        (
            {"alpha": 4.0},
            {},
            "adapter.alpha: there is no adapter without a rank; set adapter.rank = 16",
        ),
        ({"rank": 0}, {}, "adapter.rank = 0"),
        ({"rank": 4, "target": "q_proj"}, {}, "adapter.target"),
        (
            {"rank": 4},
            {
                "model": {
                    "init": "scratch",
                    "tokenizer": "train",
                    "config": {"model_type": "llama", "vocab_size": 300},
                }
            },
            "is for a model that has been trained",
        ),
        (
            {"rank": 4},
            {"model": {"path": "x", "rope": {"type": "linear", "factor": 2.0}}},
            "set adapter.merge = true",
        ),
    ],
)
def test_tables_that_make_no_adapter_are_refused(base, adapter, changes, message):
    with pytest.raises(ConfigError) as caught:
        settings(base, "refused", adapter, **changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_layers_that_are_not_there_are_refused(base):
    config = settings(base, "refused", {"rank": 4, "target_modules": "w_query"})
    with pytest.raises(
        ConfigError, match=r"adapter.target_modules = \['w_query'\]: Target modules"
    ):
        add_adapter(
            build_model(config.model, load_model_config(config)),
            config.adapter,
            config.model.path,
        )


def test_an_adapter_without_its_base_is_refused(base, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(
        ConfigError,
        match="does not say which model it is for; set base_model_name_or_path",
    ):
        load_config(GenerateSettings(folder=str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "nobody/nothing"})
    )
    with pytest.raises(
        ConfigError,
        match="'nobody/nothing' is neither a folder nor in the local cache of the Hub",
    ):
        load_config(GenerateSettings(folder=str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(base)})
    )
    asked = GenerateSettings(folder=str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        load_model(asked, load_config(asked))
