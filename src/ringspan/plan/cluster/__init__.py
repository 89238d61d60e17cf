"""Accelerators and their lookup."""
