"""Processes and meshes of ranks."""
