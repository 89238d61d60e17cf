"""Parts of a model, and their source."""
