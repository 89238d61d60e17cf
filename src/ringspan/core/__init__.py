"""Attention geometry and schedules: integer arithmetic and the float64 oracle, without any framework.

Here and in ``ringspan.torch``: B batch, S global and T local tokens, H query and G key/value heads, D size of a query's
and key's head, E of a value's, C hidden size, V vocabulary, N ranks.
"""
