"""Vision-language models on a ring: images shared out over the ranks, their embeddings brought to the text's ranks."""
