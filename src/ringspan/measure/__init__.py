"""Measurements: steps that run, are traced or rehearsed, and machines."""
