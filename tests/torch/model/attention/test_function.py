"""Results of the attention that takes the place of transformers' own, as the layers take them."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.every_model.tiny import tiny_config
from tests.torch.models import relative
from tests.torch.test_parallelize import restarting

DOCUMENTS = [[17, 20], [5, 32]]


def viewing_model() -> torch.nn.Module:
    """A small Afmoe, whose layers call ``view(B, T, H * D)`` on what attention returns."""
    from transformers import AfmoeForCausalLM

    torch.manual_seed(0)
    return AfmoeForCausalLM._from_config(tiny_config("afmoe"), dtype=torch.float32)


def ring_loss(mesh: DeviceMesh, tokens: Tensor, documents: list[list[int]]) -> Tensor:
    model = rs.parallelize(viewing_model(), mesh)
    positions = restarting(documents)
    labels = tokens.masked_fill(positions == 0, -100)
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    loss = model(**rs.shard_batch(batch, mesh)).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_with_documents_of_their_own_may_be_viewed(pool, ranks):
    """Each row has its mask, and the rows are joined with tokens first, as transformers' functions return them."""
    tokens = torch.randint(3, 97, (2, 37), generator=torch.Generator().manual_seed(0))
    model, losses, count = viewing_model().double(), 0.0, 0
    model.set_experts_implementation("eager")
    for row, lengths in zip(tokens, DOCUMENTS, strict=True):
        for document in row.split(lengths):
            logits = model(input_ids=document[None]).logits[0, :-1]
            losses += torch.nn.functional.cross_entropy(
                logits, document[1:], reduction="sum"
            )
            count += len(document) - 1
    for loss in pool.run(ring_loss, ranks, tokens, DOCUMENTS):
        assert relative(loss, (losses / count).detach()) < 1e-6
