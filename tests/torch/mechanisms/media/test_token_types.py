"""Runs of tokens that see each other, and positions in space and time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.torch.data.media.inputs import Media
from ringspan.torch.mechanisms.media.kinds import (
    blocks_of,
    grid_positions,
    is_of,
    kinds,
)
from tests.torch.mechanisms.media.models import batch_of, build


def media(types: list[list[int]], real: list[list[int]] | None = None) -> Media:
    given = torch.tensor(types)
    return Media(
        given,
        None if real is None else torch.tensor(real).bool(),
        {"token_type_ids": given},
    )


@pytest.mark.parametrize(
    ("types", "lengths", "found"),
    [
        ([0, 0, 0], None, None),
        ([1, 1, 0, 1], None, ((0, 2), (3, 4))),
        ([0, 1, 1, 1], None, ((1, 4),)),
        ([0, 1, 1, 1], [[2, 2]], ((1, 2), (2, 4))),  # a run ends with its document
        ([0, 1, 0, 1], [[2, 2]], ((1, 2), (3, 4))),
        ([1, 1, 1, 1], [[1, 2, 1]], ((0, 1), (1, 3), (3, 4))),
    ],
)
def test_runs_of_a_type_are_found(types, lengths, found):
    blocks = blocks_of(
        kinds()["gemma3"],
        media([types]),
        None if lengths is None else torch.tensor(lengths),
    )
    assert blocks == (None if found is None else [found])


def test_padding_is_in_no_run():
    assert blocks_of(kinds()["gemma3"], media([[1, 1, 1]], [[0, 1, 1]]), None) == [
        ((1, 3),)
    ]


def test_no_token_stands_for_a_sound_where_the_config_names_none():
    model = SimpleNamespace(config=SimpleNamespace(audio_token_id=None))
    assert not is_of(
        model, kinds()["voxtral"].modalities[0], torch.tensor([[0, 1]])
    ).any()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [None, (5, 7)])
def test_blocks_see_their_later_tokens(window, lengths):
    blocks = ((1, 4), (6, 11))
    places = np.arange(12)
    found = LayerMask(window=window).in_text(12, lengths, blocks).dense(places, places)
    q, k = places[:, None], places[None]
    inside = np.zeros((12, 12), bool)
    for start, stop in blocks:
        inside[start:stop, start:stop] = True
    expected = (k <= q) | inside
    if window is not None:
        expected &= q - k < window
    if lengths is not None:
        expected &= (q < 5) == (k < 5)
    assert (found == expected).all()


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_documents_count_their_own_positions(kind):
    """Each is what the model makes of it alone."""
    first, second = (
        batch_of(kind, [[3, "i", 2, "v", 5]]),
        batch_of(kind, [[1, "v", 4]], seed=2),
    )
    model = build(kind)

    def of(batch):
        inputs = {
            name: batch[name]
            for name in batch
            if name.endswith(("_thw", "_ts", "type_ids"))
        }
        return grid_positions(
            model, kinds()[kind], Media(batch["input_ids"], None, inputs), None
        )

    tokens = torch.cat((first["input_ids"], second["input_ids"]), 1)
    joined = {
        "image_grid_thw": first["image_grid_thw"],
        "video_grid_thw": torch.cat(
            (first["video_grid_thw"], second["video_grid_thw"])
        ),
    }
    if kind == "qwen2_5_vl":
        joined["second_per_grid_ts"] = torch.cat(
            (first["second_per_grid_ts"], second["second_per_grid_ts"])
        )
    lengths = torch.tensor(
        [[first["input_ids"].shape[1], second["input_ids"].shape[1]]]
    )
    found = grid_positions(model, kinds()[kind], Media(tokens, None, joined), lengths)
    assert torch.equal(found, torch.cat((of(first), of(second)), 2))
