"""Vision-language models on a ring: images shared out over ranks, embeddings sent to the text's ranks."""
