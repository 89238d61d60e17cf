"""Decoders without a head, given embeddings and a loss of the user's, against themselves on one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    PreTrainedModel,
)

import ringspan as rs
from ringspan.core.errors import LayoutError, PeerMismatch, UnsupportedError
from tests.cases import long
from tests.every_model.hybrids import hybrid_config
from tests.torch.model.tasks.test_classifier import gradients
from tests.torch.models import close_by_name, relative

SMALL: dict[str, Any] = {
    "vocab_size": 7, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {},
}


def config(kind: str) -> Any:
    without = (
        ("attn_pdrop", "resid_pdrop", "embd_pdrop")
        if kind == "gpt2"
        else ("attention_dropout",)
    )
    return AutoConfig.for_model(
        kind, **SMALL | KINDS[kind] | dict.fromkeys(without, 0.0)
    )


class Policy(PreTrainedModel):
    """Continuous observations to continuous actions: layers of its own around somebody's decoder."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.reads = nn.Linear(5, 32)
        self.decoder = AutoModel.from_config(config)
        self.writes = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 3))
        self.post_init()

    def forward(
        self, observations: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        embeddings = self.reads(observations)
        hidden = self.decoder(
            inputs_embeds=embeddings, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return self.writes(hidden)


def build(kind: str, own: bool) -> Any:
    torch.manual_seed(3)
    made = Policy(config(kind)) if own else AutoModel.from_config(config(kind))
    for parameter in made.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return made


def features(batch: int, length: int, own: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch + length)
    x = torch.randn(batch, length, 5 if own else 32, generator=generator)
    y = torch.randn(batch, length, 3 if own else 32, generator=generator)
    mask = (torch.rand(batch, length, generator=generator) < 0.7).float()
    return {"observations": x, "targets": y, "mask": mask}


def loss_of(
    model: Any, part: dict[str, Tensor], own: bool, count: Tensor
) -> tuple[Tensor, Tensor]:
    """The squared error of all tokens that count, over their number."""
    positions = {"position_ids": part["position_ids"]} if "position_ids" in part else {}
    if own:
        out = model(part["observations"], **positions)
    else:
        out = model(inputs_embeds=part["observations"], **positions).last_hidden_state
    errors = ((out - part["targets"]) ** 2).mean(-1) * part["mask"]
    return errors.sum() / count, out


def on_ring(
    mesh: DeviceMesh, kind: str, own: bool, layout: Any, length: int, checkpoint: Any
) -> Any:
    model = rs.parallelize(build(kind, own), mesh, layout=layout, checkpoint=checkpoint)
    whole = features(4, length, own)
    rows = slice(mesh["replicate"].get_local_rank(), None, mesh["replicate"].size())
    part = rs.shard_features(
        {name: x[rows] for name, x in whole.items()}, mesh, layout=layout
    )
    local, _ = loss_of(model, part, own, whole["mask"].sum())
    loss = rs.global_sum(local, mesh)
    loss.backward()
    found = gradients(model)
    with torch.no_grad():
        _, out = loss_of(model, part, own, whole["mask"].sum())
    split = rs.Layout(layout, length, mesh["ring"].size())
    return (
        loss.detach(),
        found,
        rs.unshard(out, split, mesh["ring"].get_group(), 1),
        rows,
    )


CASES = [
    ("llama", True, 3, 1, "striped", 41, "none"),
    ("llama", False, 4, 2, "zigzag", 37, "full"),
    *long(
        ("mistral", True, 3, 1, "contiguous", 43, "attention"),
        ("gemma3_text", True, 2, 1, "zigzag", 29, "attention"),
    ),
    ("gpt2", False, 2, 1, "zigzag", 29, "attention"),
]


@pytest.mark.parametrize(
    ("kind", "own", "ranks", "replicate", "layout", "length", "checkpoint"), CASES
)
def test_loss_and_gradients_are_those_of_one_process(
    pool, kind, own, ranks, replicate, layout, length, checkpoint
):
    model, whole = build(kind, own), features(4, length, own)
    loss, out = loss_of(model, whole, own, whole["mask"].sum())
    loss.backward()
    wanted = gradients(model)
    results = pool.run(
        on_ring, ranks, kind, own, layout, length, checkpoint, replicate=replicate
    )
    for found_loss, found, found_out, rows in results:
        assert relative(found_loss, loss.detach()) < 1e-6
        assert relative(found_out, out.detach()[rows]) < 3e-6
        close_by_name(found, wanted)


def saved(mesh: DeviceMesh, own: bool, folder: str) -> None:
    rs.parallelize(build("llama", own), mesh).save_pretrained(folder)


@pytest.mark.parametrize("own", [False, True])
def test_a_saved_model_opens_without_the_ring(pool, tmp_path, own):
    pool.run(saved, 2, own, str(tmp_path))
    expected = build("llama", own)
    opened = type(expected).from_pretrained(tmp_path, config=config("llama"))
    for name, weight in expected.state_dict().items():
        assert torch.equal(opened.state_dict()[name], weight), name


def refused(mesh: DeviceMesh) -> list[str]:
    model = rs.parallelize(build("llama", own=False), mesh)
    part = rs.shard_features(features(1, 24, own=False), mesh)
    x, positions = part["observations"], part["position_ids"]
    said = []
    for error, arguments in (
        (UnsupportedError, {"inputs_embeds": x}),
        (
            UnsupportedError,
            {
                "input_ids": torch.zeros(1, 12, dtype=torch.int64),
                "position_ids": positions,
            },
        ),
        (
            UnsupportedError,
            {
                "inputs_embeds": x,
                "position_ids": positions,
                "attention_mask": torch.ones(1, 12),
            },
        ),
        (
            UnsupportedError,
            {"inputs_embeds": x, "position_ids": positions, "use_cache": True},
        ),
        (LayoutError, {"inputs_embeds": x, "position_ids": torch.arange(12)[None]}),
    ):
        with pytest.raises(error) as raised:
            model(**arguments)
        said.append(str(raised.value))
    if mesh.get_rank() == 1:
        model.eval()
    with pytest.raises(PeerMismatch, match="mode"):
        model(inputs_embeds=x, position_ids=positions)
    with pytest.raises(UnsupportedError, match="of one batch and length"):
        rs.shard_features({"a": torch.zeros(1, 4, 2), "b": torch.zeros(1, 5)}, mesh)
    return said


def test_unsupported_arguments_of_a_decoder_raise_on_every_rank(pool):
    for said in pool.run(refused, 2):
        assert (
            "make both with rs.shard_features" in said[0]
            and "rs.shard_features" in said[1]
        )
        assert (
            "attention_mask cannot be honoured" in said[2]
            and "use_cache=True" in said[3]
        )
        assert "not those of the layout zigzag" in said[4]


def refused_models(mesh: DeviceMesh) -> list[str]:
    classifier = AutoModelForQuestionAnswering.from_config(config("llama"))
    encoder = AutoModel.from_config(
        AutoConfig.for_model(
            "modernbert", **SMALL, pad_token_id=0, global_attn_every_n_layers=1
        )
    )
    stateful = AutoModel.from_config(hybrid_config("lfm2"))
    said, plain = [], build("llama", own=True)
    cases: Any = [
        (classifier, "zigzag"),
        (encoder, "zigzag"),
        (stateful, "zigzag"),
        (plain, "balanced"),
    ]
    for model, layout in cases:
        with pytest.raises(UnsupportedError) as raised:
            rs.parallelize(model, mesh, layout=layout)
        said.append(str(raised.value))
    return said


def test_models_that_are_no_plain_decoders_are_refused(pool):
    for classifier, encoder, stateful, balanced in pool.run(refused_models, 2):
        assert "one token at a time" in classifier
        assert "ModernBert" in encoder
        assert "Lfm2Model has layers with a state" in stateful
        assert "'balanced' is made for documents" in balanced
