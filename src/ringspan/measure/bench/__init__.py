"""Benchmarks of attention, steps and memory beside one process."""
