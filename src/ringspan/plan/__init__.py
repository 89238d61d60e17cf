"""Know before you run: what a training step needs on a given cluster, computed, traced or rehearsed."""
