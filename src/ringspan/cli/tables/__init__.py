"""Printed tables of plans."""
