"""Attention, steps and memory, measured beside one process."""
