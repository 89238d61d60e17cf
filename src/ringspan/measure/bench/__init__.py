"""Benchmarks of attention, steps and memory against one process."""
