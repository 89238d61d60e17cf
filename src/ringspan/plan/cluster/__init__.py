"""Accelerators, and looking them up."""
