"""From data sets to each rank's part of a batch, and from hidden states to its loss."""
