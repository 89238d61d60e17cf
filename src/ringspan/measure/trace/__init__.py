"""One real step, observed while it runs or on tensors without values."""
