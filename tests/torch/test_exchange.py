"""What the exchange hands to torch."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ringspan.torch.exchange import TOTALS, Exchange, Room


def test_receives_are_posted_before_sends(monkeypatch: pytest.MonkeyPatch):
    # Otherwise gloo's request for a block waits behind the block that goes the other way: half the bandwidth.
    posted = []
    monkeypatch.setattr(dist, "P2POp", lambda operation, *_, **__: operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: posted.extend(operations) or [])
    block = torch.zeros(3)
    exchange, before = Exchange(Mock(dist.ProcessGroup), "a pass"), replace(TOTALS)
    exchange.post([(1, block), (2, block)], [(1, Room.like(block)), (2, Room.like(block))], 0)[0].wait()
    assert posted == [dist.irecv, dist.irecv, dist.isend, dist.isend]
    assert TOTALS.num_sends - before.num_sends == 2 and TOTALS.sent_bytes - before.sent_bytes == 24
