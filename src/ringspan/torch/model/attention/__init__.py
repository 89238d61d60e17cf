"""How a model's own attention becomes the ring's."""
