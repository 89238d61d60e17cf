"""Files that people name, that outlive a power cut, and that say whether they were changed."""
