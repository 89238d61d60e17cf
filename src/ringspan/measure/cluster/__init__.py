"""Capabilities of a machine or cluster."""
