"""Models of transformers on the ring: which ones, what they are asked, and what they answer."""
