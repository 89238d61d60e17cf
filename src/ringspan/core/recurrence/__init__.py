"""Recurrences over spans of a layout, as data: which span needs whose state, and which inputs of a convolution."""
