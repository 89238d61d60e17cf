"""Tests for other implementations: ``python -m ringspan.conformance --attention my_module:attention``.

The function is called on every rank with that rank's shards, and returns the shard of the result::

    def attention(q, k, v, *, causal, window, documents, length, group):
        ...

q is (B, H, T, D), k and v are (B, G, T, D) with G a divisor of H; token t of rank r is at position ``rs.Layout(name,
length, ranks).positions(r)[t]`` of the whole sequence, and positions at or past ``length`` are padding. ``window`` is
None, or how many keys a query sees, itself among them; ``documents`` is None, or the lengths of packed documents.
Scores are scaled by ``D ** -0.5``. It raises NotImplementedError for what it does not support.
"""
