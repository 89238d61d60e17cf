"""Whether all ranks do the same, with the same, and who is missing when one does not come."""
