"""From text to sequences of one length."""
