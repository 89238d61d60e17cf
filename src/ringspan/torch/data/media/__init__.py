"""Images, videos and sound of a batch, and how they are cut."""
