"""The recipe of examples/retrieval in short form: what it reads, and that its extension is that of one process."""

from argparse import Namespace
from random import Random

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaForCausalLM

import ringspan as rs
from ringspan.evaluate.task import Material
from ringspan.evaluate.tasks.lines import TASK
from tests.examples.imported import imported


def test_a_record_is_what_the_evaluation_asks():
    record = imported("retrieval", "record")
    tokenizer, lines = record.tokenizer(), 5
    prompt = TASK.build(Random(1), lines, 0.0, Material())
    asked = tokenizer(prompt.text + prompt.cue + prompt.answers[0])["input_ids"]
    example = record.Records(lines, 2, 3)[1]
    ids, labels = example["input_ids"].tolist(), example["labels"]

    assert tokenizer.decode(asked) == prompt.text + prompt.cue + prompt.answers[0]
    fixed = [at for at, token in enumerate(asked) if token < record.DIGIT]
    assert [asked[at] for at in fixed] == [ids[at] for at in fixed]
    question = 1 + record.PER_LINE * lines
    assert ids[question : question + 5] == [record.ASK, *ids[question + 5 : question + 8], record.ANSWER]
    answered = labels.view(-1)[-2 * record.PER_LINE :].view(2, -1)
    assert (answered[:, :4] == -100).all() and (answered[:, -1] == record.END).all()
    for line in example["input_ids"][-2 * record.PER_LINE :].view(2, -1).tolist():
        assert line in example["input_ids"][1:question].view(lines, -1).tolist()


def extension(mesh: DeviceMesh, folder: str) -> list[float]:
    train = imported("retrieval", "train")
    arguments = Namespace(output=train.Path(folder), length=300, tokens=150, share=0.5)
    opened = LlamaForCausalLM.from_pretrained(folder + "/short", config=train.scaled(arguments))
    model = rs.parallelize(opened, mesh, checkpoint="none")
    history: list[dict[str, float]] = []
    train.train_on(model, mesh, 13, range(6), arguments, history)
    records = train.Records(13, 13, 1, seed=2)
    batch = rs.shard_batch(train.default_collate([records[0]]), mesh)
    with torch.no_grad():
        return [history[0]["loss"], history[1]["loss"], model(**batch).loss.item()]


def test_the_extension_is_that_of_one_process(pool, tmp_path, capsys):
    train = imported("retrieval", "train")
    train.short(Namespace(output=tmp_path, steps=2, tokens=150, length=300))
    assert {folder.name for folder in tmp_path.iterdir()} == {"short", "untrained"}
    alone = pool.run(extension, 1, str(tmp_path))[0]
    for losses in pool.run(extension, 2, str(tmp_path)):
        assert losses == pytest.approx(alone, rel=1e-3)
    assert alone[1] < alone[0]
