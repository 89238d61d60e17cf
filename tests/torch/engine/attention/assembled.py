"""One rank's part in an attention, without a process group, prepared as the operator does."""

from ringspan.torch.engine.attention.prepared import prepared


def assemble(rank, ranks, exchange, q, k, slopes, spec, *, is_backward):
    """Return a rank's ring, and its trade if the route has groups."""
    made = prepared(
        "backward" if is_backward else "forward",
        (rank, ranks),
        q,
        k,
        k,
        spec,
        has_slopes=slopes is not None,
        has_sinks=False,
    )
    return made.over(exchange, slopes, q.device)
