"""One real step, looked at while it runs or on tensors without values."""
