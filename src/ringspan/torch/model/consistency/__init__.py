"""Checks that all ranks do the same with the same inputs, and a watchdog for missing ranks."""
