"""Partial results of attention, and their exact merge."""
