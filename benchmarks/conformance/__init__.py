"""Tests for other implementations: ``python -m benchmarks.conformance --attention my_module:attention``.

The function is called on every rank with that rank's shards, and returns the result's::

    def attention(q, k, v, *, causal, window, documents, length, group):
        ...

q is (B, H, T, D), k and v (B, G, T, D), G dividing H; token t of rank r is at position ``rs.Layout(name, length,
ranks).positions(r)[t]``, padding at or past ``length``. ``window``: None, or the keys a query sees, itself included;
``documents``: None, or packed documents' lengths. Scores are scaled by ``D ** -0.5``. It raises NotImplementedError for
what it does not support.
"""
