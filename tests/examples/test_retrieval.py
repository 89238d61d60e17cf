"""The recipe of examples/retrieval in short form: what it reads, and that its extension is that of one process."""

from argparse import Namespace
from random import Random

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaForCausalLM

import ringspan as rs
from ringspan.evaluate.tasks import TASKS, Material
from tests.examples.imported import imported


def test_a_record_is_what_the_evaluation_asks():
    record = imported("retrieval", "record")
    tokenizer, lines = record.tokenizer(), 5
    prompt = TASKS["lines"].build(Random(1), lines, 0.0, Material())
    asked = tokenizer(prompt.text + prompt.cue + prompt.answers[0])["input_ids"]
    example = record.Records(lines, 2, 3)[1]
    ids, labels = example["input_ids"].tolist(), example["labels"]

    assert tokenizer.decode(asked) == prompt.text + prompt.cue + prompt.answers[0]
    fixed = [at for at, token in enumerate(asked) if token < record.DIGIT]
    assert [asked[at] for at in fixed] == [ids[at] for at in fixed]
    question = 1 + record.PER_LINE * lines
    assert ids[question : question + 5] == [
        record.ASK,
        *ids[question + 5 : question + 8],
        record.ANSWER,
    ]
    answered = labels.view(-1)[-2 * record.PER_LINE :].view(2, -1)
    assert (answered[:, :4] == -100).all() and (answered[:, -1] == record.END).all()
    for line in example["input_ids"][-2 * record.PER_LINE :].view(2, -1).tolist():
        assert line in example["input_ids"][1:question].view(lines, -1).tolist()


def extension(mesh: DeviceMesh, folder: str) -> list[float]:
    train = imported("retrieval", "train")
    arguments = Namespace(output=train.Path(folder), length=300, tokens=150, share=0.5)
    opened = LlamaForCausalLM.from_pretrained(
        folder + "/short", config=train.scaled(arguments)
    )
    model = rs.parallelize(opened, mesh, checkpoint="none")
    history, stage = train.History(mesh), train.Stage(lines=13, asked=13, steps=6)
    train.train_on(model, mesh, train.Optimizers(model), stage, arguments, history)
    records = train.Records(13, 13, 1, seed=2)
    batch = rs.shard_batch(train.default_collate([records[0]]), mesh)
    with torch.no_grad():
        return [*(row["loss"] for row in history.rows), model(**batch).loss.item()]


@pytest.mark.parametrize("shape", [(24, 24), (24, 8), (8, 24)])
def test_muon_is_that_of_torch(shape):
    torch.manual_seed(0)
    ours, own = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    steps = (
        imported("retrieval", "muon").Muon([ours], lr=0.02),
        torch.optim.Muon([own], lr=0.02, weight_decay=0.0, momentum=0.95),
    )
    for _ in range(3):
        ours.grad = torch.randn(shape)
        own.grad = ours.grad.clone()
        for optimizer in steps:
            optimizer.step()
    moved = (own - 1).norm()
    assert moved > 0.02 and (ours - own).norm() < 0.03 * moved  # torch's is in bfloat16


def test_rates_rise_and_fall_in_a_stage_and_end_at_positions():
    train = imported("retrieval", "train")
    assert [
        train.Stage(80, 80, 20).share(step) for step in (1, 5, 10, 20)
    ] == pytest.approx([0.2, 1.0, 1.0, 0.1])
    lengths = [stage.length for stage in train.STAGES]
    assert lengths == sorted(lengths) and 0.99 < lengths[-1] / 16_384 <= 1


@pytest.mark.long
def test_the_extension_is_that_of_one_process(pool, tmp_path, capsys):
    train = imported("retrieval", "train")
    train.short(Namespace(output=tmp_path, steps=2, tokens=150, length=300))
    assert {folder.name for folder in tmp_path.iterdir()} == {"short", "untrained"}
    alone = pool.run(extension, 1, str(tmp_path))[0]
    for losses in pool.run(extension, 2, str(tmp_path)):
        assert losses == pytest.approx(alone, rel=1e-4)
    assert alone[1] < alone[0]
